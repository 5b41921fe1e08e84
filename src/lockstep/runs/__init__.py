"""Writes and reads what a run leaves on disk, and shows its progress; only this package knows which rank writes."""
