"""Random keys of the compiled program, from (seed, purpose, iteration, …, shard) and never from a device."""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from lockstep.core.shards import keyed_generator


def key_words(seed: int, purpose: str) -> np.ndarray:
    """Returns the words of the threefry key of ``(seed, purpose)``, uint32 ``[2]``."""
    return keyed_generator(seed, f"{purpose}/threefry").integers(0, 1 << 32, 2, dtype=np.uint32)


def key_of(words: ArrayLike) -> Array:
    """Makes a threefry key from its words, uint32 ``[2]``."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def seed_key(seed: int) -> Array:
    """Makes the threefry key that ``jax.random.key`` makes from a 32-bit seed, whatever JAX's settings are."""
    return key_of(np.array([0, seed], np.uint32))


def keyed(key: Array, *numbers: Array | int) -> Array:
    """Folds further numbers into a key."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def is_key(leaf: Any) -> TypeGuard[Array]:
    """Returns whether a leaf is a typed key, or has the dtype of one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
