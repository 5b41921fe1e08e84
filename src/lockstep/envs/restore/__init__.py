"""Brings environments back after a crash."""
