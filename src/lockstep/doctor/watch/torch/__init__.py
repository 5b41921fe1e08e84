"""What is seen of a PyTorch script."""
