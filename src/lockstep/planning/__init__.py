"""Plans a run for ``lockstep plan``: whether it fits devices, how fast it will be and why; imports no framework."""
