"""Plays array environments by fixed rules."""
