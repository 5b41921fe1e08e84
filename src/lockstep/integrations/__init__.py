"""Brings data parallelism to scripts and libraries that know nothing of it."""
