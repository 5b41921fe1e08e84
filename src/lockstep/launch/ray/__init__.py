"""Starts the ranks of a run on a Ray cluster; only this package imports Ray, and only if a run asks for it."""
