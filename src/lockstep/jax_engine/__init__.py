"""The JAX engine: one training iteration in one compiled program, sharded over a mesh."""
