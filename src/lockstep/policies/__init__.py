"""Loads, plays, evaluates, compares, records and films policies."""
