"""Where shards meet, inside a mapped program: gathers in shard order and a fixed binary tree, by the axes' names.

Devices own contiguous ranges of shards; arrays over the mesh have as many rows of each device as the one with most
shards has, and rows beyond a device's own are never read. A device adds the nodes of the tree inside its range. What is
small then meets by one gather; of what is large, slice ``j`` of every node goes to device ``j``, which finishes the
tree for its slice, and the slices are gathered: neither can show in the bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.core.tree import Tree as ShardTree
from lockstep.core.tree import tree_of
from lockstep.jax_engine.distributed import shared_memory

Tree = TypeVar("Tree")

BATCH_AXIS, FSDP_AXIS = "batch", "fsdp"
AXES = DATA_AXIS = (BATCH_AXIS, FSDP_AXIS)


SLICE_MULTIPLE = 128
"""Slices are so many floats or a multiple: else XLA makes an all-reduce of their gather on a TPU, at twice the cost."""


@dataclass(frozen=True)
class Meeting:
    """How the devices of the mapped program that is being traced meet.

    Attributes:
        axes: names of the mesh's axes, batch and fsdp.
        platform: of the mesh's devices.
        shards: the additions of the run's shards; None where there are none.
        numbers: of the program's calls where devices meet in memory; None: they meet by XLA's collectives.
    """

    axes: tuple[str, ...] = AXES
    platform: str = "cpu"
    shards: ShardTree | None = None
    numbers: Iterator[int] | None = None


_ALONE = Meeting()
_traced: ContextVar[Meeting] = ContextVar("lockstep_meeting", default=_ALONE)


def axes() -> tuple[str, ...]:
    """Gives the names of the mesh's axes, batch and fsdp, inside the mapped program that is being traced."""
    return _traced.get().axes


@contextmanager
def tracing_over(
    names: tuple[str, ...], platform: str, shards: ShardTree | None = None, shared: bool = False
) -> Iterator[None]:
    """Maps what is traced in this block over axes of these names, batch and fsdp, of devices of a platform.

    With ``shared`` shards meet in the memory of this process (:mod:`.shared_memory`), which holds every device and has
    compiled what that takes; else by XLA's collectives.
    """
    token = _traced.set(Meeting(names, platform, shards, itertools.count() if shared else None))
    try:
        yield
    finally:
        _traced.reset(token)


def _number_in_memory() -> int | None:
    """Gives the number of the program's next call in memory; None: shards meet by XLA's collectives."""
    numbers = _traced.get().numbers
    return None if numbers is None else next(numbers)


def _tree_over(rows: int) -> ShardTree:
    """Gives the additions of the run's shards; outside of a run every row of every device is one."""
    shards, devices = _traced.get().shards, jax.lax.axis_size(axes())
    return tree_of(rows * devices, devices) if shards is None else shards


def tree_sum(x: Array) -> Array:
    """Sums over the first axis by a fixed binary tree of neighbours; what has no neighbour waits for the next round."""
    while x.shape[0] > 1:
        paired = x[0:-1:2] + x[1::2]
        x = jnp.concatenate([paired, x[-1:]]) if x.shape[0] % 2 else paired
    return x[0]


def materialized(tree: Tree) -> Tree:
    """Writes values to memory before anything is made of them (inside ``jit``, on a CPU).

    XLA's CPU compiler fuses across ``optimization_barrier`` and contracts a product and a sum that meet in one loop to
    a fused multiply-add, so the last bits of ``x * y`` would depend on whether a collective stands between it and the
    next sum, which the number of devices decides. A branch is what it doesn't fuse across: where an array's first
    element is NaN, that element is written once more. Arrays that aren't floating-point are passed through.
    """
    if _traced.get().platform != "cpu":
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


def device_index() -> Array:
    """Gives this device's index along the mesh's axes, int32: its part of what is ``SHARDED``."""
    return jax.lax.axis_index(axes())


def of_device(numbers: Sequence[int]) -> Array:
    """Gives this device's number of a list of one for each, int32."""
    return jnp.asarray(numbers, jnp.int32)[device_index()]


def gather_devices(x: Tree) -> Tree:
    """Gathers ``[n, …]`` of every device, in their order: ``[devices * n, …]``; all leaves of one dtype together."""

    def gathered(rows: Array) -> Array:
        number = _number_in_memory()
        if number is not None:
            return shared_memory.gather(rows, device_index(), jax.lax.axis_size(axes()), number)
        return jax.lax.all_gather(rows, axes(), tiled=True)

    return _together(x, gathered)


def shards_alone(x: Array) -> Array:
    """Drops what is no shard's from the rows of all devices: ``[devices * rows, …]`` to ``[num_shards, …]``."""
    tree = _traced.get().shards
    if tree is None or tree.even:
        return x
    most = tree.most_shards
    return jnp.concatenate([x[device * most : device * most + len(own)] for device, own in enumerate(tree.owned)])


def gather_shards(x: Tree) -> Tree:
    """Gathers ``[local shards, …]`` in shard order: ``[num_shards, …]``; all leaves of one dtype in one collective."""
    return jax.tree.map(shards_alone, gather_devices(x))


def sum_shards(x: Tree) -> Tree:
    """Sums over all shards of ``[local shards, …]``; the same bits for every number of devices.

    All leaves of one dtype travel in one collective.
    """
    return _together(x, lambda rows: _summed(rows, _tree_over(len(rows))))


def sum_devices(x: Array) -> Array:
    """Sums of float32 arrays over all devices: on a CPU by the tree, elsewhere by the framework's all-reduce."""
    if _traced.get().platform != "cpu":
        return jax.lax.psum(x, axes())
    devices = jax.lax.axis_size(axes())
    return _summed(x.reshape(1, -1), tree_of(devices, devices)).reshape(x.shape)


def _summed(rows: Array, tree: ShardTree) -> Array:
    """Sums rows ``[local shards, m]`` of all devices to ``[m]``."""
    number = _number_in_memory() if rows.dtype == jnp.float32 else None
    by_slices = tree.sliced(rows[0].size * rows.dtype.itemsize)
    if number is not None:
        return shared_memory.tree_sum(rows, device_index(), tree, number, by_slices)
    nodes = _own_nodes(materialized(rows), tree)
    if not by_slices:
        everyone = _all_gather(nodes)
        return materialized(_finished([everyone[d, i] for d, n in enumerate(tree.counts) for i in range(n)], tree))
    devices, size = len(tree.owned), rows.shape[1]
    length = -(-size // (devices * SLICE_MULTIPLE)) * SLICE_MULTIPLE
    cut = jnp.pad(nodes, ((0, 0), (0, devices * length - size))).reshape(-1, devices, length).swapaxes(0, 1)
    slices = jax.lax.all_to_all(materialized(cut), axes(), 0, 0)  # of all devices' nodes [devices, most nodes, length]
    mine = materialized(_finished([slices[d, i] for d, n in enumerate(tree.counts) for i in range(n)], tree))
    return _all_gather(mine).reshape(-1)[:size]


def _all_gather(x: Array) -> Array:
    """Gathers ``[…]`` of every device: ``[devices, …]``, bit by bit.

    On an accelerator floats travel as whole numbers: XLA may gather by adding zeros, which would make 0 of -0.
    """
    if _traced.get().platform == "cpu" or x.dtype != jnp.float32:
        return jax.lax.all_gather(x, axes())
    bits = jax.lax.all_gather(jax.lax.bitcast_convert_type(x, jnp.int32), axes())
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _own_nodes(rows: Array, tree: ShardTree) -> Array:
    """Sums this device's rows to the nodes of the tree inside its range; a device with fewer has zeros after them."""
    kinds = [
        _Sums(tuple((node.start - own.start, node.stop - own.start) for node in nodes), tree.most_nodes)
        for own, nodes in zip(tree.owned, tree.nodes, strict=True)
    ]
    different = list(dict.fromkeys(kinds))
    if len(different) == 1:
        return different[0](rows)
    which = of_device([different.index(kind) for kind in kinds])
    return materialized(jax.lax.switch(which, different, rows))


@dataclass(frozen=True)
class _Sums:
    """Sums the rows of each span by the tree; zeros after them make as many as ``most``."""

    spans: tuple[tuple[int, int], ...]
    most: int

    def __call__(self, rows: Array) -> Array:
        sums = [tree_sum(rows[a:b]) for a, b in self.spans]
        return jnp.stack(sums + [jnp.zeros_like(sums[0])] * (self.most - len(sums)))


def _finished(parts: Sequence[Array], tree: ShardTree) -> Array:
    """Finishes the tree with the nodes of all devices, from left to right."""
    if tree.regular:
        return tree_sum(jnp.stack(parts))
    sums = list(parts)
    for left, right in tree.additions:
        sums[left] = sums[left] + sums[right]
    return sums[0]


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
