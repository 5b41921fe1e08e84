"""Small networks, with recurrent cores or without, whose gradients are written by hand in NumPy."""
