"""Keeps what a run leaves on disk and shows on the terminal; the only place that knows which rank writes."""
