"""A trained policy as a PyTorch module, and as files that other programs run."""
