"""Devices and settings that are fixed before JAX starts."""
