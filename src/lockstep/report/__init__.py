"""Writes one HTML page about runs, from their files alone: nothing that a run names is imported."""
