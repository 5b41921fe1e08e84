"""How a config scales over ranks: measured by ``lockstep bench``. Imports no framework."""
