"""Random keys of the compiled program: of (seed, purpose, iteration, …, shard), never of a device."""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from lockstep.core.shards import keyed_generator


def key_words(seed: int, purpose: str) -> np.ndarray:
    """Gives the words of the threefry key of ``(seed, purpose)``, uint32 ``[2]``."""
    return keyed_generator(seed, f"{purpose}/threefry").integers(0, 1 << 32, 2, dtype=np.uint32)


def key_of(words: ArrayLike) -> Array:
    """Gives the threefry key of its words, uint32 ``[2]``."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def seed_key(seed: int) -> Array:
    """Gives the threefry key that ``jax.random.key`` makes of a seed of 32 bits, whatever settings of JAX's say."""
    return key_of(np.array([0, seed], np.uint32))


def keyed(key: Array, *numbers: Array | int) -> Array:
    """Gives the key of further numbers."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def is_key(leaf: Any) -> TypeGuard[Array]:
    """Tells typed keys, and what stands for one by its dtype, from other arrays."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
