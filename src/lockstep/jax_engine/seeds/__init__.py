"""Independent agents of several seeds, trained in one program."""
