"""Everything that touches meshes, shardings and ``jax.distributed``: devices, placement, and the collectives of a run.

A mesh has the axes ``("batch", "fsdp")``; data is cut over both, in the order of the devices: process by process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jax.sharding import Mesh as Mesh

from lockstep.errors import RankMismatchError
from lockstep.jax_engine.reductions import AXES, BATCH_AXIS, FSDP_AXIS, tracing_over
from lockstep.jax_engine.reductions import gather_shards as gather_shards
from lockstep.jax_engine.reductions import gather_tree as gather_tree
from lockstep.jax_engine.reductions import map_shards as map_shards
from lockstep.jax_engine.reductions import materialized as materialized
from lockstep.jax_engine.reductions import shard_index as shard_index
from lockstep.jax_engine.reductions import tree_sum as tree_sum
from lockstep.jax_engine.set_up import check_device, configure, machine_facts
from lockstep.topology import Topology

Tree = TypeVar("Tree")

REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(AXES)
TIME_SHARDED = PartitionSpec(None, AXES)

SHUTDOWN_TIMEOUT_SECONDS = 30
LOOPBACK_ADDRESS = "127.0.0.1"

_active: ContextVar[Mesh | None] = ContextVar("lockstep_mesh", default=None)


# --- processes ----------------------------------------------------------------------------------------------------


def set_up_jax(
    threads: int, platform: str, simulate_devices: int | None, topology: Topology, pool_devices: int | None = None
) -> None:
    """Set JAX up, before anything uses a device, and join the processes of the run; what is done is done once.

    Args:
        threads: CPU threads per process; 1 keeps XLA's own operations single-threaded.
        platform: ``cpu``, ``cuda`` or ``tpu``.
        simulate_devices: how many devices to make of this process's CPU; one by default.
        topology: this process's place.
        pool_devices: see :func:`~lockstep.jax_engine.set_up.configure`.

    Raises:
        ValueError: the machine has no such device, or JAX has started with other settings in this process.
        RankMismatchError: the processes can't meet.
    """
    configure(threads, platform, simulate_devices, pool_devices)
    if topology.world_size > 1 and not jax.distributed.is_initialized():
        _join_processes(topology, platform)
    check_device(platform)


def _join_processes(topology: Topology, platform: str) -> None:
    """Meet the other processes at rank 0's coordinator; one process a GPU where several share a host."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours: it asks to stop
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
    if topology.loopback:
        _keep_gloo_on_loopback()


def _keep_gloo_on_loopback() -> None:
    """Have gloo listen on loopback rather than where the host's name leads, which may be the network or nowhere.

    JAX has no public setting for it; a version without these internals listens where the host's name leads.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=LOOPBACK_ADDRESS
        )
        make_client = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def leave_processes() -> None:
    """Leave the other processes of the run, if there are any."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def this_process() -> Topology:
    """This process's place among those that ``jax.distributed`` joined."""
    return Topology(rank=jax.process_index(), world_size=jax.process_count())


def gather_bytes(payload: bytes) -> list[bytes]:
    """Bytes of every process, in order; every process must call it."""
    if jax.process_count() == 1:
        return [payload]
    words = np.frombuffer(payload, np.uint8)
    sizes = multihost_utils.process_allgather(np.array([words.size], np.int32)).reshape(-1)
    rows = multihost_utils.process_allgather(np.pad(words, (0, int(sizes.max()) - words.size)))
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_json(value: Any) -> list[Any]:
    """A JSON value of every process, in order; every process must call it."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode())]


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
            f"({jax.default_backend()}); use at most {present}, or simulate more on a CPU "
            "(--simulate-devices, jax_num_cpu_devices)"
        )
    if requested % processes:
        raise ValueError(
            f"num_devices: {requested} devices don't divide over {processes} processes; {_near(requested, processes)}"
        )
    return requested


def make_mesh(num_fsdp_devices: int = 1, num_devices: int | None = None, axis_name: str = BATCH_AXIS) -> Mesh:
    """A mesh with the axes ``("batch", "fsdp")`` over the devices of all processes, each giving equally many.

    Devices stand in the order of processes, so that each process holds a contiguous part of the data; XLA's own
    choice of order, which follows the network, would cut the data differently on different machines.

    Args:
        num_fsdp_devices: length of the ``fsdp`` axis, over which parameters are cut.
        num_devices: devices to use; all by default.
        axis_name: another name for the ``batch`` axis.

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
    return Mesh(grid, (axis_name, FSDP_AXIS), axis_types=(AxisType.Auto,) * len(AXES))


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


def stacked(spec: PartitionSpec) -> PartitionSpec:
    """The spec of arrays with a leading axis (of seeds) that isn't cut, before the axes of ``spec``."""
    return PartitionSpec(None, *spec)


def named_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding of a spec on a mesh, such as ``REPLICATED``, ``SHARDED`` or ``TIME_SHARDED``."""
    return NamedSharding(mesh, _renamed(spec, mesh))


def _renamed(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec in the names of a mesh whose batch axis is called otherwise."""
    if BATCH_AXIS in mesh.axis_names:
        return spec

    def of(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(of, part))
        return mesh.axis_names[0] if part == BATCH_AXIS else part

    return PartitionSpec(*map(of, spec))


def data_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis cut over all devices of the mesh."""
    return named_sharding(mesh, SHARDED)


def replicate_sharding(mesh: Mesh) -> NamedSharding:
    """The whole array on every device of the mesh."""
    return named_sharding(mesh, REPLICATED)


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
        return NamedSharding(mesh, cut_along(axis))

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


def cut_along(axis: int) -> PartitionSpec:
    """The spec of an array whose axis is cut over the ``fsdp`` axis."""
    return PartitionSpec(*[None] * axis, FSDP_AXIS)


def cut_axis(sharding: NamedSharding) -> int | None:
    """Which axis of an array a sharding of :func:`fsdp_sharding` cuts; None: none."""
    return next((axis for axis, name in enumerate(sharding.spec) if name is not None), None)


# --- placing and fetching arrays ------------------------------------------------------------------------------------


def _near(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def _check_rows(leaf: Any, parts: int, what: str, where: str = "") -> None:
    """Raise unless the leading axis of a leaf divides into as many parts as there are devices."""
    shape = np.shape(leaf)
    if not shape:
        raise ValueError(
            f"{where}a scalar has no leading axis to cut over {parts} devices; use replicate_on_mesh for it"
        )
    if shape[0] % parts:
        raise ValueError(f"{where}{shape[0]} {what} don't divide over {parts} devices; {_near(shape[0], parts)}")


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
    return jax.make_array_from_process_local_data(named_sharding(mesh, spec), x, tuple(shape))


def fetch(array: Any) -> np.ndarray:
    """A replicated or fully addressable array, on the host."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(f"an array {array.shape} cut over processes can't be fetched whole; use fetch_rows")
    return np.asarray(array)


def fetch_rows(array: Any, axis: int = 0) -> np.ndarray:
    """This process's rows of an array that is cut along one axis, on the host; the reverse of :func:`shard_rows`."""
    parts = {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=axis)


def place(value: Any, sharding: Sharding) -> Array:
    """A value that every process holds whole, laid out by a sharding over the devices of all processes.

    Args:
        value: an array of any dtype (JAX's typed keys too), on the host or on devices.
        sharding: of the result.
    """
    if sharding.is_fully_addressable or (isinstance(value, Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    if _is_key(value):
        data = place(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_key(value: Any) -> bool:
    return isinstance(value, Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def replicate_on_mesh(pytree: Tree, mesh: Mesh) -> Tree:
    """Every leaf whole on every device of the mesh; every process must give the same values."""
    return jax.tree.map(lambda leaf: place(leaf, replicate_sharding(mesh)), pytree)


def shard_pytree(pytree: Tree, mesh: Mesh) -> Tree:
    """Every leaf cut along its leading axis (environments, samples) over all devices of the mesh.

    Args:
        pytree: leaves ``[n, …]``; with several processes each gives its own rows, and the result has those of all.
        mesh: whose devices to cut over.

    Raises:
        ValueError: a leaf is a scalar, or its leading axis doesn't divide over the devices; both numbers are named.
    """
    parts = num_local_devices(mesh)

    def of(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        _check_rows(leaf, parts, "environments", f"{name}: " if name else "")
        if parts == mesh.size:
            return jax.device_put(leaf, data_sharding(mesh))
        if _is_key(leaf):
            return jax.random.wrap_key_data(of(path, jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return shard_rows(leaf, mesh)

    return jax.tree_util.tree_map_with_path(of, pytree)


def replicate(pytree: Tree, mesh: Mesh | None = None) -> Tree:
    """A copy of every leaf for every device, along a new leading axis ``[num_devices, …]`` that is cut over them.

    Args:
        pytree: the same in every process.
        mesh: the active one (:func:`set_mesh`) by default, else one of all devices.
    """
    mesh = mesh or active_mesh() or make_mesh()
    return jax.tree.map(lambda leaf: _row_each(lambda _: jnp.asarray(leaf)[None], mesh), pytree)


def unreplicate(pytree: Tree) -> Tree:
    """The reverse of :func:`replicate`: the first row that this process holds of every leaf.

    Raises:
        ValueError: a leaf has no leading axis.
    """

    def of(leaf: Any) -> Any:
        if not np.shape(leaf):
            raise ValueError("a scalar has no device axis to drop; it was not made by replicate")
        if not isinstance(leaf, Array) or not leaf.committed:
            return leaf[0]
        return min(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0).data[0]

    return jax.tree.map(of, pytree)


def split_key_across_devices(key: Array, n: int | None = None) -> Array:
    """A random key for each device: ``jax.random.split(key, n)``, one on each.

    Args:
        key: typed (``jax.random.key``) or raw (``jax.random.PRNGKey``), the same in every process.
        n: how many devices; all those of the active mesh by default, else all there are.

    Raises:
        ValueError: there are fewer devices.
    """
    mesh = active_mesh()
    if mesh is None or n not in (None, mesh.size):
        mesh = make_mesh(num_devices=n)
    keys = jax.random.split(key, mesh.size)
    return _row_each(lambda i: keys[i : i + 1], mesh)


def first_copy(array: Array) -> Array:
    """A replicated array on this process's first device alone."""
    return min(array.addressable_shards, key=lambda shard: shard.device.id).data


def gathered(array: Any) -> np.ndarray:
    """An array of any sharding, whole, on the host; a collective if it is cut over processes."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        assert isinstance(array.sharding, NamedSharding), array.sharding
        array = jax.jit(lambda x: x, out_shardings=NamedSharding(array.sharding.mesh, REPLICATED))(array)
    return np.asarray(array)


def wait_for_all(name: str) -> None:
    """Return once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _row_each(row: Callable[[int], Array], mesh: Mesh) -> Array:
    """``[num_devices, …]`` with row ``i``, given as ``[1, …]``, on device ``i``; each process makes its own rows."""
    rows = [
        jax.device_put(row(i), device)
        for i, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays((mesh.size, *rows[0].shape[1:]), data_sharding(mesh), rows)


# --- inside a mapped program ----------------------------------------------------------------------------------------


def over_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of one device's part as a function of global arrays (``jax.shard_map``).

    Args:
        function: takes and returns the part of one device.
        mesh: whose devices each run it.
        in_specs: how the arguments are cut: ``REPLICATED``, ``SHARDED``, ``TIME_SHARDED``, or pytrees of those.
        out_specs: how the results are put together. ``REPLICATED`` is believed, not checked.
    """

    def part(*arguments: Any) -> Any:
        with tracing_over(tuple(map(str, mesh.axis_names))):
            return function(*arguments)

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda spec: _renamed(spec, mesh), tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return jax.shard_map(part, mesh=mesh, in_specs=specs(in_specs), out_specs=specs(out_specs), check_vma=False)


# --- what a run says of itself ------------------------------------------------------------------------------------


def device_line(mesh: Mesh) -> str:
    """The devices of a mesh in words: how many, of what kind, in how many processes."""
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    processes = len({device.process_index for device in mesh.devices.flat})
    where = f" in {processes} processes" if processes > 1 else ""
    fsdp = mesh.shape[FSDP_AXIS]
    cut = f" ({mesh.axis_names[0]} {mesh.size // fsdp}, fsdp {fsdp})" if fsdp > 1 else ""
    return f"{mesh.size} device{'s' if mesh.size > 1 else ''}{where}{cut} [{', '.join(kinds)}]"
