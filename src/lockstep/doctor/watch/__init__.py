"""Watches a script from inside its ranks and records what they hold."""
