"""Trains and opens runs from Python (``lockstep.train``, ``lockstep.load_run``) by running the command line."""
