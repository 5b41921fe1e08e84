"""The host that this process is on: what control groups leave it, and by which addresses others reach it."""
