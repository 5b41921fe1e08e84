"""Judges from the ranks' traces whether they are one agent."""
