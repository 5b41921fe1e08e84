"""Brings data parallelism to scripts and libraries that were written for one process."""
