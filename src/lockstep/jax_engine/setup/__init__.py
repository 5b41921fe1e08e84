"""Chooses devices and settings that must be fixed before JAX starts."""
