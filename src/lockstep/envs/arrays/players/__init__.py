"""Plays array environments by a rule."""
