"""Environments whose state is tensors on the device."""
