"""Restores environments after a crash."""
