"""Looks at a PyTorch script."""
