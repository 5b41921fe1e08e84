"""Draws array environments."""
