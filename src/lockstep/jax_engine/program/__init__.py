"""The compiled program: iterations, calls, keys and seeds."""
