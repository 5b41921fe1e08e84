"""Runs the commands of the command line, one file each."""
