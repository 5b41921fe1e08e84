"""Trains independent agents of several seeds in one program."""
