"""Starts ranks and watches them, in a separate process, for a launcher on the same machine."""
