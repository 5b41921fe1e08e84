"""Everything that touches meshes, shardings and ``jax.distributed``: devices, placement, and the collectives of a run.

A mesh has the axes ``("batch", "fsdp")``; data is cut over both, in the order of the devices: process by process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.errors import RankMismatchError
from lockstep.jax_engine.set_up import check_device, configure, machine_facts
from lockstep.jax_engine.reductions import materialized, tree_sum
from lockstep.topology import Topology

Tree = TypeVar("Tree")

BATCH_AXIS, FSDP_AXIS = "batch", "fsdp"
AXES = (BATCH_AXIS, FSDP_AXIS)
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(AXES)
TIME_SHARDED = PartitionSpec(None, AXES)

SHUTDOWN_TIMEOUT_SECONDS = 30

_active: ContextVar[Mesh | None] = ContextVar("lockstep_mesh", default=None)


# --- processes ----------------------------------------------------------------------------------------------------


def set_up_jax(threads: int, platform: str, simulate_devices: int | None, topology: Topology) -> None:
    """Set JAX up, before anything uses a device, and join the processes of the run.

    Args:
        threads: CPU threads per process; 1 keeps XLA's own operations single-threaded.
        platform: ``cpu``, ``cuda`` or ``tpu``.
        simulate_devices: how many devices to make of this process's CPU; one by default.
        topology: this process's place.

    Raises:
        ValueError: the machine has no such device, or JAX has started with other settings in this process.
        RankMismatchError: the processes can't meet.
    """
    configure(threads, platform, simulate_devices)
    if topology.world_size > 1:
        _join_processes(topology, platform)
    check_device(platform)


def _join_processes(topology: Topology, platform: str) -> None:
    """Meet the other processes at rank 0's coordinator; one process a GPU where several share a host."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = topology.coordinator
    one_each = platform == "cuda" and topology.local_world_size > 1
    try:
        jax.distributed.initialize(
            address,
            topology.world_size,
            topology.rank,
            local_device_ids=topology.local_rank if one_each else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address if topology.loopback else None,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankMismatchError(f"rank {topology.rank} can't meet the others at {address}: {reason}") from None


def leave_processes() -> None:
    """Leave the other processes of the run, if there are any."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def gather_json(value: Any) -> list[Any]:
    """A JSON value of every process, in order; every process must call it."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    rows = multihost_utils.process_allgather(np.pad(payload, (0, int(sizes.max()) - payload.size)))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def check_ranks_alike(config_sha256: str) -> None:
    """Raise a ``RankMismatchError`` in every process if machines, versions or configs differ between processes."""
    everyone = gather_json(machine_facts() | {"config": config_sha256})
    for rank, theirs in enumerate(everyone):
        for key, value in everyone[0].items():
            if theirs[key] != value:
                raise RankMismatchError(
                    f"rank {rank} differs from rank 0 in {key}: {theirs[key]} against {value}; "
                    "the same agent needs the same kind of machine, versions and config on every rank"
                )


# --- devices and the mesh -----------------------------------------------------------------------------------------


def get_num_devices(requested: int | None = None) -> int:
    """How many devices to use, over all processes.

    Args:
        requested: that many; all there are by default.

    Raises:
        ValueError: there are fewer, or the processes can't have equal shares.
    """
    present, processes = jax.device_count(), jax.process_count()
    if requested is None:
        return present
    if requested < 1:
        raise ValueError(f"num_devices: {requested} must be at least 1; {present} are present")
    if requested > present:
        raise ValueError(
            f"num_devices: {requested} devices were asked for and {present} are present "
            f"({jax.default_backend()}); use at most {present}, or simulate more on a CPU (--simulate-devices)"
        )
    if requested % processes:
        raise ValueError(
            f"num_devices: {requested} devices don't divide over {processes} processes; {_near(requested, processes)}"
        )
    return requested


def make_mesh(num_fsdp_devices: int = 1, num_devices: int | None = None) -> Mesh:
    """A mesh with the axes ``("batch", "fsdp")`` over the devices of all processes, each giving equally many.

    Devices stand in the order of processes, so that each process holds a contiguous part of the data; XLA's own
    choice of order, which follows the network, would cut the data differently on different machines.

    Args:
        num_fsdp_devices: length of the ``fsdp`` axis, over which parameters are cut.
        num_devices: devices to use; all by default.

    Raises:
        ValueError: more devices than are present, or a number that ``num_fsdp_devices`` doesn't divide.
    """
    count = get_num_devices(num_devices)
    if num_fsdp_devices < 1 or count % num_fsdp_devices:
        fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(f"num_fsdp_devices: {num_fsdp_devices} doesn't divide num_devices {count}; use one of {fits}")
    share = count // jax.process_count()
    devices = []
    for process in range(jax.process_count()):
        own = sorted((d for d in jax.devices() if d.process_index == process), key=lambda d: d.id)
        if len(own) < share:
            raise ValueError(f"num_devices: process {process} has {len(own)} devices and {share} of each are needed")
        devices += own[:share]
    grid = np.array(devices).reshape(count // num_fsdp_devices, num_fsdp_devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextmanager
def set_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make a mesh the active one, for Lockstep and for JAX, until the block ends."""
    token = _active.set(mesh)
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        _active.reset(token)


def active_mesh() -> Mesh | None:
    """The mesh of the innermost :func:`set_mesh` block, or None outside of any."""
    return _active.get()


# --- shardings ----------------------------------------------------------------------------------------------------


def named_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding of a spec on a mesh, such as ``REPLICATED``, ``SHARDED`` or ``TIME_SHARDED``."""
    return NamedSharding(mesh, spec)


def data_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis cut over all devices of the mesh."""
    return NamedSharding(mesh, SHARDED)


def replicate_sharding(mesh: Mesh) -> NamedSharding:
    """The whole array on every device of the mesh."""
    return NamedSharding(mesh, REPLICATED)


def fsdp_sharding(pytree: Any, mesh: Mesh, min_size_mbytes: float = 4) -> Any:
    """How to cut parameters and moments over the ``fsdp`` axis: a sharding for each leaf.

    An array of at least ``min_size_mbytes`` MiB is cut along its largest dimension that the axis divides (the first
    among equals). Smaller ones, those with fewer than two dimensions and those that nothing divides are replicated.

    Args:
        pytree: arrays, or the shapes that ``jax.eval_shape`` gives.
        mesh: whose ``fsdp`` axis to use; with length 1 everything is replicated.
        min_size_mbytes: threshold in MiB (2**20 bytes).
    """
    parts = mesh.shape[FSDP_AXIS]

    def of(leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        size = math.prod(shape) * _itemsize(leaf)
        fitting = [(n, -axis) for axis, n in enumerate(shape) if n and n % parts == 0]
        if parts == 1 or len(shape) < 2 or size < min_size_mbytes * 2**20 or not fitting:
            return replicate_sharding(mesh)
        axis = -max(fitting)[1]
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, FSDP_AXIS))

    return jax.tree.map(of, pytree)


def _itemsize(leaf: Any) -> int:
    return jnp.dtype(getattr(leaf, "dtype", None) or jnp.result_type(leaf)).itemsize


def activation_sharding_constraint(x: Tree, mesh: Mesh | None = None) -> Tree:
    """Keep activations cut along their leading axis over all devices, inside ``jit``.

    Args:
        x: an array ``[batch, …]`` or a pytree of such.
        mesh: the active one (:func:`set_mesh`) by default; without any, ``x`` is returned as it is.

    Raises:
        ValueError: the leading axis doesn't divide over the devices of the mesh.
    """
    mesh = mesh or active_mesh()
    if mesh is None:
        return x
    jax.tree.map(lambda leaf: _check_rows(leaf, mesh.size, "rows"), x)
    return jax.lax.with_sharding_constraint(x, data_sharding(mesh))


# --- placing and fetching arrays ------------------------------------------------------------------------------------


def _near(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def _check_rows(leaf: Any, parts: int, what: str) -> None:
    """Raise unless the leading axis of a leaf divides into as many parts as there are devices."""
    shape = np.shape(leaf)
    if not shape:
        raise ValueError(f"a scalar has no leading axis to cut over {parts} devices; use replicate_on_mesh for it")
    if shape[0] % parts:
        raise ValueError(f"{shape[0]} {what} don't divide over {parts} devices; {_near(shape[0], parts)}")


def num_local_devices(mesh: Mesh) -> int:
    """Devices of the mesh that this process holds."""
    return len(mesh.local_devices)


def local_rows(mesh: Mesh, n: int) -> slice:
    """Which of ``n`` global rows this process holds, when they are cut over the mesh.

    Raises:
        ValueError: ``n`` doesn't divide over the devices.
    """
    _check_rows(np.empty((n, 0)), mesh.size, "rows")
    first = [d.process_index for d in mesh.devices.flat].index(jax.process_index())
    rows = n // mesh.size
    return slice(first * rows, (first + num_local_devices(mesh)) * rows)


def shard_rows(x: Any, mesh: Mesh, axis: int = 0) -> Array:
    """Make this process's rows its part of a global array that is cut over the mesh.

    Args:
        x: ``[…, local rows, …]`` on the host.
        mesh: to cut over, in the order of processes.
        axis: which axis the rows are: 0, or 1 for time-major arrays.
    """
    x, spec = np.asarray(x), SHARDED if axis == 0 else PartitionSpec(*[None] * axis, AXES)
    parts = num_local_devices(mesh)
    if x.shape[axis] % parts:
        raise ValueError(f"{x.shape[axis]} rows don't divide over {parts} devices; {_near(x.shape[axis], parts)}")
    shape = list(x.shape)
    shape[axis] *= mesh.size // parts
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x, tuple(shape))


def fetch(array: Any) -> np.ndarray:
    """A replicated or fully addressable array, on the host."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(f"an array {array.shape} cut over processes can't be fetched whole; use fetch_rows")
    return np.asarray(array)


def fetch_rows(array: Array, axis: int = 0) -> np.ndarray:
    """This process's rows of an array that is cut along one axis, on the host; the reverse of :func:`shard_rows`."""
    parts = {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=axis)


# --- inside a mapped program ----------------------------------------------------------------------------------------


def over_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of one device's part as a function of global arrays (``jax.shard_map``).

    Args:
        function: takes and returns the part of one device.
        mesh: whose devices each run it.
        in_specs: how the arguments are cut: ``REPLICATED``, ``SHARDED``, ``TIME_SHARDED``, or pytrees of those.
        out_specs: how the results are put together. ``REPLICATED`` is believed, not checked.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def shard_index(axis_names: Sequence[str] = AXES) -> Array:
    """Index of this device along the axes, int32; it holds part ``i`` of what is ``SHARDED``."""
    return jax.lax.axis_index(tuple(axis_names))


def gather_shards(x: Tree, axis_names: Sequence[str] = AXES) -> Tree:
    """``[local shards, …]`` of every device, in shard order: ``[num_shards, …]``."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, tuple(axis_names), tiled=True), x)


def gather_tree(x: Tree, axis_names: Sequence[str] = AXES) -> Tree:
    """Sum over all shards of ``[local shards, …]``; the same bits for every number of devices.

    A device adds its own aligned subtree of the shards' fixed binary tree, the partial sums are gathered in shard order
    and every device finishes the tree. All leaves of one dtype travel in one collective.
    """
    leaves, structure = jax.tree.flatten(x)
    sums: list[Array] = [jnp.zeros(())] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        members = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(len(leaves[i]), -1) for i in members], axis=1)
        partial = tree_sum(materialized(flat))
        total = materialized(tree_sum(jax.lax.all_gather(partial, tuple(axis_names))))
        ends = np.cumsum([math.prod(leaves[i].shape[1:]) for i in members])
        for i, part in zip(members, jnp.split(total, ends[:-1]), strict=True):
            sums[i] = part.reshape(leaves[i].shape[1:])
    return jax.tree.unflatten(structure, sums)
