"""Loads, plays, evaluates, compares, records, films, clones and exports policies."""
