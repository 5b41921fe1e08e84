"""The compiled program: iterations, calls, inputs and outputs."""
