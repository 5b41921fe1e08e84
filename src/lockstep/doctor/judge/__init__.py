"""Judges the ranks by their traces."""
