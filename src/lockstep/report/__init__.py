"""Writes one HTML page about runs, by their files alone: nothing that a run names is imported."""
