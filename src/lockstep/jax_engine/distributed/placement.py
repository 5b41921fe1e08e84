"""Places arrays on a mesh and fetches them: whole, by rows, or as a copy for every device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from lockstep.core.life import life
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.distributed.mesh import (
    REPLICATED,
    SHARDED,
    Mesh,
    active_mesh,
    check_mesh,
    check_rows,
    data_sharding,
    is_data,
    make_mesh,
    named_sharding,
    nearest,
    over_mesh,
    replicate_sharding,
)
from lockstep.jax_engine.distributed.reductions import axes
from lockstep.jax_engine.shards.keys import is_key

Tree = TypeVar("Tree")


# --- whole arrays ---------------------------------------------------------------------------------------------------


def place(value: ArrayLike, sharding: Sharding) -> Array:
    """Places a value that every process holds whole, or a typed key, on the devices of all processes."""
    if sharding.is_fully_addressable or (isinstance(value, Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    if is_key(value):
        data = place(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def replicate_on_mesh(pytree: Tree, mesh: Mesh) -> Tree:
    """Places every leaf whole on every device of the mesh; every process must pass the same values."""
    return jax.tree.map(lambda leaf: place(leaf, replicate_sharding(mesh)) if is_data(leaf) else leaf, pytree)


def fetch(array: ArrayLike) -> np.ndarray:
    """Copies a replicated or fully addressable array to the host."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(f"an array {array.shape} cut over processes can't be fetched whole; use fetch_rows")
    with life.waiting():
        return np.asarray(array)


def gathered(array: ArrayLike) -> np.ndarray:
    """Copies an array of any sharding whole to the host; a collective if it is cut over processes."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        assert isinstance(array.sharding, NamedSharding), array.sharding
        with life.waiting():
            array = _whole_on(array.sharding.mesh)(array)
    with life.waiting():
        return np.asarray(array)


@functools.cache
def _whole_on(mesh: Mesh) -> Callable[[Array], Array]:
    """Makes the program that copies an array whole to every device.

    Cached, because a new one would compile at each call.
    """
    return jax.jit(_same, out_shardings=NamedSharding(mesh, REPLICATED))


def _same(x: Array) -> Array:
    return x


def waited(program: Callable[..., Any]) -> Callable[..., Any]:
    """Marks calls of a program with collectives as waiting, except the first call, which compiles.

    A call may return only when the one before is over, for example where a process has several CPU devices.
    """
    called = False

    @functools.wraps(program)
    def call(*args: Any) -> Any:
        nonlocal called
        with life.waiting() if called else contextlib.nullcontext():
            called = True
            return program(*args)

    return call


def connect(mesh: Mesh) -> None:
    """Connects the processes' devices in every group that a program of the mesh may use; a collective."""

    def together(x: Array) -> list[Array]:
        return [jax.lax.all_gather(x, group) for group in (axes(), *axes())]

    rows = shard_rows(np.zeros(num_local_devices(mesh), np.float32), mesh)
    with life.waiting():
        jax.block_until_ready(jax.jit(over_mesh(together, mesh, SHARDED, REPLICATED))(rows))


def first_copy(array: Array) -> Array:
    """Returns the copy of a replicated array on this process's first device."""
    return min(array.addressable_shards, key=lambda shard: shard.device.id).data


# --- rows of several processes --------------------------------------------------------------------------------------


def num_local_devices(mesh: Mesh) -> int:
    """Returns the number of the mesh's devices that this process holds."""
    return len(mesh.local_devices)


def shard_rows(x: ArrayLike, mesh: Mesh) -> Array:
    """Makes a global array cut over the mesh, to which this process contributes its rows ``[local rows, …]``."""
    rows = np.asarray(x)
    count, parts = len(rows), num_local_devices(mesh)
    if count % parts:
        raise ValueError(f"{count} rows don't divide over {parts} devices; {nearest(count, parts)}")
    shape = (count * (mesh.size // parts), *rows.shape[1:])
    return jax.make_array_from_process_local_data(named_sharding(mesh, SHARDED), rows, shape)


def fetch_rows(array: Array, axis: int = 0) -> np.ndarray:
    """Copies this process's rows of an array cut along ``axis`` to the host.

    For axis 0 it reverses :func:`shard_rows`.
    """
    parts = {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards}
    with life.waiting():
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=axis)


def shard_pytree(pytree: Tree, mesh: Mesh) -> Tree:
    """Cuts every leaf along its leading axis (environments, samples) over all devices of the mesh.

    Args:
        pytree: leaves ``[n, …]``; each of several processes passes its own rows, and the result has those of all.
        mesh: the mesh whose devices to cut over.

    Raises:
        ValueError: if a leaf is a scalar, or its leading axis doesn't divide over the devices; both numbers are named.
    """
    check_mesh(mesh)
    parts = num_local_devices(mesh)

    def of(path: KeyPath, leaf: Array) -> Array:
        if not is_data(leaf):
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        check_rows(leaf, parts, "environments", f"{name}: " if name else "")
        if parts == mesh.size:
            return jax.device_put(leaf, data_sharding(mesh))
        if is_key(leaf):
            return jax.random.wrap_key_data(of(path, jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return shard_rows(leaf, mesh)

    return jax.tree_util.tree_map_with_path(of, pytree)


# --- a copy for every device ----------------------------------------------------------------------------------------


def replicate(pytree: Tree, mesh: Mesh | None = None) -> Tree:
    """Copies every leaf to every device, along a new leading axis ``[num_devices, …]`` that is cut over the devices.

    Args:
        pytree: the same in every process.
        mesh: by default the active one (:func:`set_mesh`), else one of all devices.
    """
    mesh = mesh or active_mesh() or make_mesh()

    def of(leaf: Array) -> Array:
        return _row_each(lambda _: jnp.asarray(leaf)[None], mesh) if is_data(leaf) else leaf

    with without_callers_context():  # its mesh needn't have the devices where the leaves are
        return jax.tree.map(of, pytree)


def unreplicate(pytree: Tree) -> Tree:
    """Drops the axis that :func:`replicate` added: returns the first row of every leaf that this process holds.

    Raises:
        ValueError: if a leaf has no leading axis, or this process holds no whole row of it.
    """

    def of(leaf: Array) -> Array:
        if not is_data(leaf):
            return leaf
        if not np.shape(leaf):
            raise ValueError("a scalar has no device axis to drop; it was not made by replicate")
        if not isinstance(leaf, Array) or isinstance(leaf, Tracer) or not leaf.committed:
            return leaf[0]
        first = min(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0).data
        if first.shape[1:] == leaf.shape[1:]:
            return first[0]
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"an array {leaf.shape} whose rows are cut over processes has no whole row here; it was not made by "
                "replicate"
            )
        return leaf[0]

    with without_callers_context() if _is_known(pytree) else contextlib.nullcontext():
        return jax.tree.map(of, pytree)


def _is_known(pytree: Any) -> bool:
    """Returns whether no leaf is traced; in a traced function JAX's mesh can't be changed."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(pytree))


def split_key_across_devices(key: Array, n: int | None = None) -> Array:
    """Makes a random key for each device: ``jax.random.split(key, n)``, one on each.

    Args:
        key: typed (``jax.random.key``) or raw (``jax.random.PRNGKey``), the same in every process.
        n: number of devices; by default those of the active mesh, else all that are present.

    Raises:
        ValueError: if there are fewer devices.
    """
    mesh = active_mesh()
    if mesh is None or n not in (None, mesh.size):
        mesh = make_mesh(num_devices=n)
    with without_callers_context():
        keys = jax.random.split(key, mesh.size)
        return _row_each(lambda i: keys[i : i + 1], mesh)


def _row_each(row: Callable[[int], Array], mesh: Mesh) -> Array:
    """Makes ``[num_devices, …]`` with row ``i``, passed as ``[1, …]``, on device ``i``.

    A process makes its own rows.
    """
    rows = [
        jax.device_put(row(i), device)
        for i, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays((mesh.size, *rows[0].shape[1:]), data_sharding(mesh), rows)
