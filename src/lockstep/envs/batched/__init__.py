"""Environments that step many at once."""
