"""Lockstep from Python: ``lockstep.train`` and ``lockstep.load_run``, whose runs are the command line's."""
