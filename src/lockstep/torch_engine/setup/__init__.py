"""Devices, clocks, and the checks before training."""
