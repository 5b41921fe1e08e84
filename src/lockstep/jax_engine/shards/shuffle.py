"""Permutes without sorting, by an invertible hash of the index that is repeated where it leaves the range.

A bijection of the numbers below a power of two, made of keyed invertible rounds, is applied until the result lies below
``n`` (cycle walking), which makes it a bijection of the numbers below ``n`` (Mitchell et al. 2022, "Bandwidth-optimal
random shuffling for GPUs", sections 3 and 4, with a cheaper cipher). It is cheaper than sorting random numbers.
"""

from __future__ import annotations

import jax
from jax import Array, lax
from jax import numpy as jnp

ROUNDS = 8


def permutation(key: Array, n: int) -> Array:
    """Makes the permutation of ``0 … n-1`` that a key decides, int32 ``[n]``."""
    bits = max(1, (n - 1).bit_length())
    keys = jax.random.bits(key, (2, ROUNDS), jnp.uint32)
    index = _mixed(jnp.arange(n, dtype=jnp.uint32), keys, bits)
    if n != 1 << bits:
        index = lax.while_loop(lambda x: (x >= n).any(), lambda x: jnp.where(x >= n, _mixed(x, keys, bits), x), index)
    return index.astype(jnp.int32)


def _mixed(x: Array, keys: Array, bits: int) -> Array:
    """Permutes the numbers below ``2**bits`` by odd multiplications, additions and xor-shifts, each invertible."""
    mask, half = jnp.uint32((1 << bits) - 1), max(1, (bits + 1) // 2)
    for number in range(ROUNDS):
        x = (x * (keys[0, number] | 1) + keys[1, number]) & mask
        x = x ^ (x >> half)
    return x
