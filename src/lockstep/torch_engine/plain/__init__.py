"""Small networks, with or without recurrent cores, whose gradients are written by hand in NumPy."""
