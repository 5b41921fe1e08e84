"""Networks, distributions and custom modules in PyTorch."""
