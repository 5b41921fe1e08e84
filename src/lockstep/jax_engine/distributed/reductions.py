"""Where shards meet, inside a mapped program: gathers in shard order and a fixed binary tree, by the axes' names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.jax_engine.distributed import shared_memory

Tree = TypeVar("Tree")

BATCH_AXIS, FSDP_AXIS = "batch", "fsdp"
AXES = DATA_AXIS = (BATCH_AXIS, FSDP_AXIS)

_traced: ContextVar[tuple[tuple[str, ...], Iterator[int] | None]] = ContextVar("lockstep_axes", default=(AXES, None))
"""Names of axes, and numbers of a program's calls where shards meet in memory."""


def axes() -> tuple[str, ...]:
    """Gives the names of the mesh's axes, batch and fsdp, inside the mapped program that is being traced."""
    return _traced.get()[0]


@contextmanager
def tracing_over(names: tuple[str, ...], shared: bool = False) -> Iterator[None]:
    """Maps what is traced in this block over axes of these names, batch and fsdp.

    With ``shared`` shards meet in the memory of this process (:mod:`.shared_memory`), which holds every device and has
    compiled what that takes; else by XLA's collectives.
    """
    token = _traced.set((names, itertools.count() if shared else None))
    try:
        yield
    finally:
        _traced.reset(token)


def _number_in_memory() -> int | None:
    """Gives the number of the program's next call in memory; None: shards meet by XLA's collectives."""
    numbers = _traced.get()[1]
    return None if numbers is None else next(numbers)


def tree_sum(x: Array) -> Array:
    """Sums over the first axis (a power of two long) by a fixed binary tree of neighbours."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def materialized(tree: Tree) -> Tree:
    """Writes values to memory before anything is made of them (inside ``jit``, on a CPU).

    XLA's CPU compiler fuses across ``optimization_barrier`` and contracts a product and a sum that meet in one loop to
    a fused multiply-add, so the last bits of ``x * y`` would depend on whether a collective stands between it and the
    next sum, which the number of devices decides. A branch is what it doesn't fuse across: where an array's first
    element is NaN, that element is written once more. Arrays that aren't floating-point are passed through.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.optimization_barrier(tree)
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not floats:
        return tree
    chosen = [leaves[i] for i in floats]
    first = jnp.stack([jnp.isnan(jnp.ravel(x)[0]) for x in chosen]).any()

    def rewritten(x: Array) -> Array:
        place = (0,) * x.ndim
        return x.at[place].set(jnp.where(jnp.isnan(x[place]), jnp.nan, x[place]))

    kept = jax.lax.cond(first, lambda xs: [rewritten(x) for x in xs], lambda xs: xs, chosen)
    for i, x in zip(floats, kept, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def shard_index() -> Array:
    """Gives this device's index along the mesh's axes, int32: its part of what is ``SHARDED``."""
    return jax.lax.axis_index(axes())


def gather_shards(x: Tree) -> Tree:
    """Gathers ``[local shards, …]`` in shard order: ``[num_shards, …]``; all leaves of one dtype in one collective."""

    def gathered(rows: Array) -> Array:
        number = _number_in_memory()
        if number is not None:
            return shared_memory.gather(rows, shard_index(), jax.lax.axis_size(axes()), number)
        return jax.lax.all_gather(rows, axes(), tiled=True)

    return _together(x, gathered)


def sum_shards(x: Tree) -> Tree:
    """Sums over all shards of ``[local shards, …]``; the same bits for every number of devices.

    A device adds its own aligned subtree of the shards' fixed binary tree, the partial sums are gathered in shard order
    and every device finishes the tree. All leaves of one dtype travel in one collective.
    """

    def summed(rows: Array) -> Array:
        number = _number_in_memory() if rows.dtype == jnp.float32 else None
        if number is not None:
            return shared_memory.tree_sum(rows, shard_index(), jax.lax.axis_size(axes()), number)
        partial = tree_sum(materialized(rows))
        return materialized(tree_sum(jax.lax.all_gather(partial, axes())))

    return _together(x, summed)


def sum_devices(x: Array) -> Array:
    """Sums of float32 arrays over all devices: on a CPU by the tree, elsewhere by the framework's all-reduce."""
    if jax.default_backend() != "cpu":
        return jax.lax.psum(x, axes())
    return sum_shards(x.reshape(1, -1)).reshape(x.shape)


def _together(tree: Tree, function: Callable[[Array], Array]) -> Tree:
    """Applies a function of rows ``[n, m]``, which may change or drop ``n``, to the leaves of each dtype side by side.

    Those of two dtypes would be two collectives without an order: they could hold two threads of a device, see
    :func:`lockstep.jax_engine.setup.set_up.lean_pool`, and in memory devices would meet in different ones, which ends
    the program. What the engine sends together is of one.
    """
    leaves, structure = jax.tree.flatten(tree)
    out: list[Array] = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        members = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        total = function(jnp.concatenate([leaves[i].reshape(len(leaves[i]), -1) for i in members], axis=1))
        ends = np.cumsum([math.prod(leaves[i].shape[1:]) for i in members])
        for i, part in zip(members, jnp.split(total, ends[:-1], axis=-1), strict=True):
            out[i] = part.reshape(*total.shape[:-1], *leaves[i].shape[1:])
    return jax.tree.unflatten(structure, out)
