"""Describes what checkpoints of ``lockstep.jax`` hold: the leaves of pytrees, and the facts of a training."""
