"""Host environments beside the compiled program."""
