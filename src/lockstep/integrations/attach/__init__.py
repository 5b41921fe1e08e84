"""Brings data parallelism to any PyTorch loop: ``lockstep.attach``."""
