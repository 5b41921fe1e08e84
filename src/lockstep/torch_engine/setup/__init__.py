"""Devices, clocks, and what is found out before training."""
