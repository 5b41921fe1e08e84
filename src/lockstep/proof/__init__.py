"""Proves that the ranks hold the same agent, and that every world size gives it."""
