"""Tasks in the style of pmap task libraries, see :mod:`lockstep.jax.pmap.task`."""
