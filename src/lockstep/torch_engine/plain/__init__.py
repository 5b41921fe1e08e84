"""Small networks with gradients written by hand in NumPy."""
