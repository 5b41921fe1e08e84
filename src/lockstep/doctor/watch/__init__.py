"""Watches a script from inside its ranks."""
