"""Checks requests for several seeds, and trains seeds that can't share one program, each in its own process."""
