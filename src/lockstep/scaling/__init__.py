"""Measures how a config scales over ranks, for ``lockstep bench``; imports no framework."""
