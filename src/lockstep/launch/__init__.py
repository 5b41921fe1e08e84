"""Starts the ranks of a run, watches them, and ends them together."""
