"""The JAX engine: the whole iteration in one compiled program. Nothing here imports the PyTorch engine."""
