"""Random keys of the compiled program: of (seed, purpose, iteration, …, shard), never of a device."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.shards import keyed_generator


def purpose_key(seed: int, purpose: str) -> Array:
    """The threefry key of ``(seed, purpose)``."""
    words = keyed_generator(seed, f"{purpose}/threefry").integers(0, 1 << 32, 2, dtype=np.uint32)
    with jax.ensure_compile_time_eval():  # also where a program is being traced
        return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def keyed(key: Array, *numbers: Array | int) -> Array:
    """The key of further numbers."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
