"""Gathers and sums shards inside a mapped program: in shard order, and by a fixed binary tree.

Devices own contiguous ranges of shards. Arrays over the mesh have equally many rows for each device, as many as the
device with most shards needs; rows beyond a device's own are never read. A device adds the nodes of the tree inside its
range. Small vectors then meet by one gather. Of large ones, slice ``j`` of every node goes to device ``j``, which
finishes the tree for its slice, and the slices are gathered. Both ways give the same bits.
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
"""Slices are a multiple of this many floats: else XLA turns their gather into a dearer all-reduce on a TPU."""


@dataclass(frozen=True)
class Meeting:
    """How the devices of the mapped program that is being traced exchange data.

    Attributes:
        axes: names of the mesh's axes, batch and fsdp.
        platform: of the mesh's devices.
        shards: the tree of the run's shards; None outside a run.
        numbers: numbers the program's calls if devices exchange data in memory; None if they use XLA's collectives.
    """

    axes: tuple[str, ...] = AXES
    platform: str = "cpu"
    shards: ShardTree | None = None
    numbers: Iterator[int] | None = None


_ALONE = Meeting()
_traced: ContextVar[Meeting] = ContextVar("lockstep_meeting", default=_ALONE)


def axes() -> tuple[str, ...]:
    """Returns the names of the mesh's axes, batch and fsdp, inside the mapped program that is being traced."""
    return _traced.get().axes


@contextmanager
def tracing_over(
    names: tuple[str, ...], platform: str, shards: ShardTree | None = None, shared: bool = False
) -> Iterator[None]:
    """Sets the axes (batch and fsdp) and the platform of the mapped program that is traced in the block.

    With ``shared``, devices exchange data in this process's memory (:mod:`.shared_memory`); the process must hold every
    device, and the library for it must be compiled. Else they use XLA's collectives.
    """
    token = _traced.set(Meeting(names, platform, shards, itertools.count() if shared else None))
    try:
        yield
    finally:
        _traced.reset(token)


def _number_in_memory() -> int | None:
    """Returns the number of the program's next exchange in memory; None if devices use XLA's collectives."""
    numbers = _traced.get().numbers
    return None if numbers is None else next(numbers)


def _tree_over(rows: int) -> ShardTree:
    """Returns the tree of the run's shards; outside a run every row of every device is a shard."""
    shards, devices = _traced.get().shards, jax.lax.axis_size(axes())
    return tree_of(rows * devices, devices) if shards is None else shards


def tree_sum(x: Array) -> Array:
    """Sums over the first axis by a fixed binary tree of neighbours; an odd row waits for the next round."""
    while x.shape[0] > 1:
        paired = x[0:-1:2] + x[1::2]
        x = jnp.concatenate([paired, x[-1:]]) if x.shape[0] % 2 else paired
    return x[0]


def materialized(tree: Tree) -> Tree:
    """Writes values to memory before anything is computed from them (inside ``jit``, on a CPU).

    XLA's CPU compiler fuses across ``optimization_barrier``, and contracts a product and a sum in one loop to a fused
    multiply-add. The last bits of ``x * y`` would then depend on whether a collective stands between it and the next
    sum, and so on the number of devices. The compiler doesn't fuse across a branch, so this adds one: where an array's
    first element is NaN, that element is written again. Arrays that aren't floating-point are passed through.
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
    """Returns this device's index along the mesh's axes, int32: its part of arrays that are ``SHARDED``."""
    return jax.lax.axis_index(axes())


def of_device(numbers: Sequence[int]) -> Array:
    """Selects this device's entry from a list with one number per device, int32."""
    return jnp.asarray(numbers, jnp.int32)[device_index()]


def gather_devices(x: Tree) -> Tree:
    """Gathers ``[n, …]`` of every device, in device order: ``[devices * n, …]``.

    Leaves of one dtype share a collective.
    """

    def gathered(rows: Array) -> Array:
        number = _number_in_memory()
        if number is not None:
            return shared_memory.gather(rows, device_index(), jax.lax.axis_size(axes()), number)
        return jax.lax.all_gather(rows, axes(), tiled=True)

    return _together(x, gathered)


def shards_alone(x: Array) -> Array:
    """Drops rows that belong to no shard from those of all devices: ``[devices * rows, …]`` to ``[num_shards, …]``."""
    tree = _traced.get().shards
    if tree is None or tree.even:
        return x
    most = tree.most_shards
    return jnp.concatenate([x[device * most : device * most + len(own)] for device, own in enumerate(tree.owned)])


def gather_shards(x: Tree) -> Tree:
    """Gathers ``[local shards, …]`` in shard order: ``[num_shards, …]``; leaves of one dtype share a collective."""
    return jax.tree.map(shards_alone, gather_devices(x))


def sum_shards(x: Tree) -> Tree:
    """Sums ``[local shards, …]`` over all shards; the bits are the same for every number of devices.

    Leaves of one dtype share a collective.
    """
    return _together(x, lambda rows: _summed(rows, _tree_over(len(rows))))


def sum_devices(x: Array) -> Array:
    """Sums float32 arrays over all devices: on a CPU by the tree, elsewhere by the framework's all-reduce."""
    if _traced.get().platform != "cpu":
        return all_reduce(x)
    devices = jax.lax.axis_size(axes())
    return _summed(x.reshape(1, -1), tree_of(devices, devices)).reshape(x.shape)


def all_reduce(x: Array) -> Array:
    """Sums arrays over all devices by the framework's all-reduce, also on a CPU."""
    return jax.lax.psum(x, axes())


def gather_slices(x: Array, axis: int) -> Array:
    """Joins what the devices along ``fsdp`` hold of an array that is cut along ``axis``: the whole array."""
    return jax.lax.all_gather(x, FSDP_AXIS, axis=axis, tiled=True)


def scatter_sum(x: Array, axis: int) -> Array:
    """Sums whole arrays over all devices; each gets its slice of the sum, cut along ``axis`` over ``fsdp``."""
    part = jax.lax.psum_scatter(x, FSDP_AXIS, scatter_dimension=axis, tiled=True)
    return jax.lax.psum(part, axes()[0])


def sum_slices(x: Array) -> Array:
    """Sums arrays over the devices along ``fsdp``."""
    return jax.lax.psum(x, FSDP_AXIS)


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
    slices = jax.lax.all_to_all(materialized(cut), axes(), 0, 0)  # [devices, most nodes, length]: all devices' nodes
    mine = materialized(_finished([slices[d, i] for d, n in enumerate(tree.counts) for i in range(n)], tree))
    return _all_gather(mine).reshape(-1)[:size]


def _all_gather(x: Array) -> Array:
    """Gathers ``[…]`` of every device: ``[devices, …]``, bit by bit.

    On an accelerator floats travel as integers: XLA may gather by adding zeros, which would turn -0 into 0.
    """
    if _traced.get().platform == "cpu" or x.dtype != jnp.float32:
        return jax.lax.all_gather(x, axes())
    bits = jax.lax.all_gather(jax.lax.bitcast_convert_type(x, jnp.int32), axes())
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _own_nodes(rows: Array, tree: ShardTree) -> Array:
    """Sums this device's rows to the tree's nodes inside its range; zeros pad them to the most nodes of any device."""
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
    """Sums the rows of each span by the tree, and pads the sums with zeros to ``most`` rows."""

    spans: tuple[tuple[int, int], ...]
    most: int

    def __call__(self, rows: Array) -> Array:
        sums = [tree_sum(rows[a:b]) for a, b in self.spans]
        return jnp.stack(sums + [jnp.zeros_like(sums[0])] * (self.most - len(sums)))


def _finished(parts: Sequence[Array], tree: ShardTree) -> Array:
    """Finishes the tree from the nodes of all devices, from left to right."""
    if tree.regular:
        return tree_sum(jnp.stack(parts))
    sums = list(parts)
    for left, right in tree.additions:
        sums[left] = sums[left] + sums[right]
    return sums[0]


def _together(tree: Tree, function: Callable[[Array], Array]) -> Tree:
    """Applies a function of rows ``[n, m]``, which may change or drop ``n``, to the leaves of each dtype side by side.

    Leaves of two dtypes would make two collectives without an order between them. They could hold two threads of a
    device (see :func:`lockstep.jax_engine.setup.set_up.lean_pool`). In memory, devices would meet in different ones,
    which ends the program. So the engine only sends leaves of one dtype together.
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
