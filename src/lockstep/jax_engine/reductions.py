"""What shards meet in: a fixed binary tree, kept apart from the programs around it."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")


def tree_sum(x: Array) -> Array:
    """Sum over the first axis (a power of two long) by a fixed binary tree of neighbours."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def materialized(tree: Tree) -> Tree:
    """The same values, written to memory before anything is made of them (inside ``jit``, on a CPU).

    XLA's CPU compiler fuses across ``optimization_barrier`` and contracts a product and a sum that meet in one loop to
    a fused multiply-add, so the last bits of ``x * y`` would depend on whether a collective stands between it and the
    next sum, which the number of devices decides. A branch is what it doesn't fuse across: an array whose first element
    is NaN becomes NaN, another is left as it is.

    Args:
        tree: arrays of any shapes; those that aren't floating-point are passed through.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.optimization_barrier(tree)
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not floats:
        return tree
    chosen = [leaves[i] for i in floats]
    first = jnp.stack([jnp.isnan(jnp.ravel(x)[0]) for x in chosen]).any()
    kept = jax.lax.cond(first, lambda xs: [x * jnp.nan for x in xs], lambda xs: xs, chosen)
    for i, x in zip(floats, kept, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)
