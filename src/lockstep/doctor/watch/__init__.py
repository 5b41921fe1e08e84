"""What runs inside a script's ranks and watches them."""
