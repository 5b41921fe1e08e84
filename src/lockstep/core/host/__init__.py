"""The host of this process: the limits of its control groups, and the addresses by which others reach it."""
