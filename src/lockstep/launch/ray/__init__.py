"""Starts the ranks of a run on a Ray cluster; Ray is imported nowhere else, and here only once it is asked for."""
