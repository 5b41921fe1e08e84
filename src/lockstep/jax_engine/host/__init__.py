"""Steps environments on the host, beside the compiled program."""
