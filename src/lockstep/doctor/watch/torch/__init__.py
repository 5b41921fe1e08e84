"""Watches what a PyTorch script holds: optimisers, modules, gradients and normalisers."""
