"""Environments inside the compiled program."""
