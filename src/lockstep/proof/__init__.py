"""Proves that every world size trains the same agent, for ``lockstep verify``."""
