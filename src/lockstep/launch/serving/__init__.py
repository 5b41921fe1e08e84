"""The process that starts ranks and looks after them, for a launcher on the same machine."""
