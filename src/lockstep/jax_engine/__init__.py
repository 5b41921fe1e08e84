"""The JAX engine, which runs a whole iteration in one compiled program. Nothing here imports the PyTorch engine."""
