"""What the traces of all ranks say."""
