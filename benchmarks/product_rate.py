"""Floating-point operations a second of one core in XLA's product of large matrices: prints one number.

XLA's pool has two threads at least, whatever the number of devices, so the process is held to one core.
"""

from __future__ import annotations

import os
import sys
import time

import jax
from jax import numpy as jnp

from lockstep.jax_engine.setup.set_up import configure

SIZE, REPEATS = 1024, 20


def main() -> None:
    """Time products of two matrices; the best of some repeats, for it is a ceiling."""
    if not hasattr(os, "sched_setaffinity"):
        sys.exit("a process can't be held to one core here")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    configure(1, "cpu", 1)
    product = jax.jit(lambda x, y: x @ y)
    x = jnp.ones((SIZE, SIZE))
    jax.block_until_ready(product(x, x))
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best = min(best, time.perf_counter() - started)
    print(2 * SIZE**3 / best)


if __name__ == "__main__":
    main()
