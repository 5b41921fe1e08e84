"""Makes meshes, and says how arrays are cut over them.

A mesh has the axes ``("batch", "fsdp")``. Data is cut over both, in the order of the devices: process by process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as Mesh
from jax.typing import ArrayLike

from lockstep.core.tree import Tree as ShardTree
from lockstep.jax_engine.distributed.active_mesh import ActiveMesh as ActiveMesh
from lockstep.jax_engine.distributed.active_mesh import activated as activated
from lockstep.jax_engine.distributed.active_mesh import active_mesh as active_mesh
from lockstep.jax_engine.distributed.active_mesh import set_mesh as set_mesh
from lockstep.jax_engine.distributed.reductions import AXES, BATCH_AXIS, FSDP_AXIS, tracing_over
from lockstep.jax_engine.shards.keys import is_key

Tree = TypeVar("Tree")
Result = TypeVar("Result")

Pytree = Any
"""Arrays, or one object per array, nested in tuples, dicts, lists and registered classes."""

Specs = Any
"""A pytree of partition specs; one spec may stand for a whole subtree."""

REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(AXES)
TIME_SHARDED = PartitionSpec(None, AXES)


# --- devices and the mesh -----------------------------------------------------------------------------------------


def get_num_devices(requested: int | None = None) -> int:
    """Returns how many devices to use, over all processes.

    Args:
        requested: the number to use; by default all that are present.

    Raises:
        ValueError: if fewer are present, or processes can't have equal shares.
    """
    present, processes = jax.device_count(), jax.process_count()
    if requested is None:
        return present
    if not _is_count(requested):
        raise ValueError(f"num_devices: {requested!r} must be a whole number, at least 1; {present} are present")
    requested = int(requested)
    if requested > present:
        raise ValueError(
            f"num_devices: Requested {requested} devices and {present} are present ({jax.default_backend()}); use "
            f"at most {present}, or simulate more on a CPU (--simulate-devices, jax_num_cpu_devices)"
        )
    if requested % processes:
        raise ValueError(
            f"num_devices: {requested} devices don't divide over {processes} processes; {nearest(requested, processes)}"
        )
    return requested


def _is_count(value: Any) -> bool:
    """Returns whether a value is a whole number of devices, at least 1."""
    number = value.item() if isinstance(value, np.number) else value
    return isinstance(number, int | float) and not isinstance(number, bool) and number >= 1 and number % 1 == 0


def check_divisible(name: str, parts: Any, devices: int) -> None:
    """Raises a one-line ``ValueError`` unless ``parts`` divides the number of devices; ``name`` is the setting's."""
    if not _is_count(parts) or devices % parts:
        fits = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise ValueError(f"{name}: {parts!r}, and num_devices {devices} must be divisible by it; use one of {fits}")


def make_mesh(num_fsdp_devices: int = 1, num_devices: int | None = None, axis_name: str = BATCH_AXIS) -> Mesh:
    """Makes a mesh with the axes ``("batch", "fsdp")`` over equally many devices of every process.

    Devices are ordered by process, so that each process holds a contiguous part of the data. XLA's own order follows
    the network, and would cut the data differently on different machines.

    Args:
        num_fsdp_devices: length of the ``fsdp`` axis, over which parameters are cut.
        num_devices: devices to use; all by default.
        axis_name: another name for the ``batch`` axis.

    Raises:
        ValueError: if more devices are asked for than are present, or ``num_fsdp_devices`` doesn't divide their number.
    """
    count = get_num_devices(num_devices)
    check_divisible("num_fsdp_devices", num_fsdp_devices, count)
    num_fsdp_devices = int(num_fsdp_devices)
    share = count // jax.process_count()
    devices = []
    for process in range(jax.process_count()):
        own = sorted((d for d in jax.devices() if d.process_index == process), key=lambda d: d.id)
        if len(own) < share:
            raise ValueError(f"num_devices: process {process} has {len(own)} devices and {share} of each are needed")
        devices += own[:share]
    return mesh_of(devices, num_fsdp_devices, axis_name)


def mesh_of(devices: Sequence[Any], num_fsdp_devices: int = 1, axis_name: str = BATCH_AXIS) -> Mesh:
    """Makes a mesh of these devices in their order; they may be another process's, or only described."""
    grid = np.array(devices).reshape(len(devices) // num_fsdp_devices, num_fsdp_devices)
    return Mesh(grid, (axis_name, FSDP_AXIS), axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of a mesh's devices: ``cpu``, ``gpu`` or ``tpu``."""
    return mesh.devices.flat[0].platform


def check_one_kind(mesh: Mesh) -> None:
    """Raises a one-line ``ValueError`` if a mesh mixes kinds of devices, whose results differ in the last bits."""
    found = Counter(device.device_kind for device in mesh.devices.flat)
    if len(found) > 1:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(found.items()))
        raise ValueError(
            f"num_devices: {mesh.size} devices of different kinds ({kinds}), whose results differ in last bits; let "
            "the run see those of one kind (CUDA_VISIBLE_DEVICES)"
        )


def check_mesh(mesh: Any) -> None:
    """Raises a one-line ``ValueError`` if ``mesh`` is no ``Mesh``."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: {type(mesh).__name__} was given; give one of make_mesh")


# --- shardings ----------------------------------------------------------------------------------------------------


def stacked(spec: PartitionSpec) -> PartitionSpec:
    """Puts a leading axis that isn't cut, that of seeds, before the axes of ``spec``."""
    return PartitionSpec(None, *spec)


def named_sharding(mesh: Mesh, spec: PartitionSpec | Sequence[Any]) -> NamedSharding:
    """Returns the sharding of a spec on a mesh: ``REPLICATED``, ``SHARDED``, or a tuple such as ``("fsdp", None)``.

    Raises:
        ValueError: if the spec names an axis that the mesh doesn't have; the message is one line.
    """
    check_mesh(mesh)
    spec = spec if isinstance(spec, PartitionSpec) else PartitionSpec(*spec)
    try:
        return NamedSharding(mesh, _renamed(spec, mesh))
    except ValueError as error:
        raise ValueError(f"spec: {tuple(spec)!r}: {str(error).splitlines()[0]}") from None


def _renamed(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Renames the batch axis in a spec to the mesh's own name for it."""
    if BATCH_AXIS in mesh.axis_names:
        return spec

    def renamed(name: str) -> str:
        return mesh.axis_names[0] if name == BATCH_AXIS else name

    return PartitionSpec(*(tuple(map(renamed, x)) if isinstance(x, tuple) else x and renamed(x) for x in spec))


def data_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that cuts the leading axis over all devices of the mesh."""
    return named_sharding(mesh, SHARDED)


def replicate_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps the whole array on every device of the mesh."""
    return named_sharding(mesh, REPLICATED)


def fsdp_sharding(pytree: Pytree, mesh: Mesh, min_size_mbytes: float = 4) -> Pytree:
    """Returns a sharding for each leaf, which says how parameters and moments are cut over the ``fsdp`` axis.

    An array of at least ``min_size_mbytes`` MiB is cut along its largest dimension that the axis divides (the first
    among equals), and its spec names every dimension: ``("fsdp", None)``. Everything else is replicated: smaller
    arrays, those with fewer than two dimensions or none that the axis divides, random keys, and functions.

    Args:
        pytree: arrays, or the shapes that ``jax.eval_shape`` gives.
        mesh: the mesh with the ``fsdp`` axis; with length 1 everything is replicated.
        min_size_mbytes: threshold in MiB (2**20 bytes).

    Raises:
        ValueError: if the mesh has no such axis; the message is one line.
    """
    check_mesh(mesh)
    if FSDP_AXIS not in mesh.axis_names:
        raise ValueError(
            f"mesh: its axes are {', '.join(map(str, mesh.axis_names))} and none is {FSDP_AXIS}, over which parameters "
            "are cut; give one of make_mesh(num_fsdp_devices)"
        )
    parts = mesh.shape[FSDP_AXIS]

    def of(leaf: Array | jax.ShapeDtypeStruct) -> NamedSharding:
        if not is_data(leaf):
            return replicate_sharding(mesh)
        shape = np.shape(leaf)
        if is_key(leaf):
            return replicate_sharding(mesh)
        size = math.prod(shape) * _itemsize(leaf)
        fitting = [(n, -axis) for axis, n in enumerate(shape) if n and n % parts == 0]
        if parts == 1 or len(shape) < 2 or size < min_size_mbytes * 2**20 or not fitting:
            return replicate_sharding(mesh)
        axis = -max(fitting)[1]
        return NamedSharding(mesh, PartitionSpec(*cut_along(axis), *[None] * (len(shape) - axis - 1)))

    return jax.tree.map(of, pytree)


def is_data(leaf: Any) -> bool:
    """Returns whether a leaf holds numbers; functions and strings in a pytree are left alone."""
    return not (callable(leaf) or isinstance(leaf, str | bytes))


def _itemsize(leaf: Array | jax.ShapeDtypeStruct) -> int:
    return jnp.dtype(getattr(leaf, "dtype", None) or jnp.result_type(leaf)).itemsize


def activation_sharding_constraint(x: Tree, mesh: Mesh | None = None) -> Tree:
    """Keeps activations cut along their leading axis over all devices, inside ``jit``.

    Args:
        x: an array ``[batch, …]`` or a pytree of such.
        mesh: by default the active one (:func:`set_mesh`); if there is none, ``x`` is returned as it is.

    Raises:
        ValueError: if the leading axis doesn't divide over the devices of the mesh.
    """
    mesh = mesh or active_mesh()
    if mesh is None:
        return x

    def of(leaf: Any) -> Any:
        if not is_data(leaf):
            return leaf
        check_rows(leaf, mesh.size, "rows")
        return jax.lax.with_sharding_constraint(leaf, data_sharding(mesh))

    return jax.tree.map(of, x)


def cut_along(axis: int) -> PartitionSpec:
    """Returns the spec of an array that is cut along ``axis`` over the ``fsdp`` axis."""
    return PartitionSpec(*[None] * axis, FSDP_AXIS)


def cut_axis(sharding: NamedSharding) -> int | None:
    """Returns the axis along which a sharding of :func:`fsdp_sharding` cuts its array; None if it doesn't."""
    return next((axis for axis, name in enumerate(sharding.spec) if name is not None), None)


def nearest(value: int, divisor: int) -> str:
    """Returns advice with the multiples of ``divisor`` on both sides of a value."""
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def check_rows(leaf: ArrayLike, parts: int, what: str, where: str = "") -> None:
    """Raises a ``ValueError`` unless the leading axis of a leaf divides into ``parts``, the number of devices."""
    shape = np.shape(leaf)
    if not shape:
        raise ValueError(
            f"{where}a scalar has no leading axis to cut over {parts} devices; use replicate_on_mesh for it"
        )
    if shape[0] % parts:
        raise ValueError(
            f"{where}{shape[0]} {what} don't divide over {parts} devices (they must be divisible by them); "
            f"{nearest(shape[0], parts)}"
        )


# --- inside a mapped program ----------------------------------------------------------------------------------------


def over_mesh(
    function: Callable[..., Result],
    mesh: Mesh,
    in_specs: Specs,
    out_specs: Specs,
    shards: ShardTree | None = None,
    shared: bool = False,
) -> Callable[..., Result]:
    """Maps a function of one device's part over a mesh, as a function of global arrays (``jax.shard_map``).

    Specs are ``REPLICATED`` (not checked for results), ``SHARDED``, ``TIME_SHARDED``, or pytrees of those. ``shards``
    and ``shared`` are those of :func:`~lockstep.jax_engine.distributed.reductions.tracing_over`.
    """

    def part(*arguments: Pytree) -> Result:
        with tracing_over(tuple(map(str, mesh.axis_names)), platform_of(mesh), shards, shared):
            return function(*jax.tree.map(_made_here_if_empty, arguments))

    def specs(tree: Specs) -> Specs:
        return jax.tree.map(lambda spec: _renamed(spec, mesh), tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return jax.shard_map(part, mesh=mesh, in_specs=specs(in_specs), out_specs=specs(out_specs), check_vma=False)


def _made_here_if_empty(x: Array) -> Array:
    """Replaces an array without elements by a new one: JAX 0.11's compiler crashes if it is passed on."""
    return jnp.zeros(x.shape, x.dtype) if x.size == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended) else x


def laid_out(mesh: Mesh, specs: Specs) -> Pytree:
    """Returns the shardings of specs on a mesh, for ``jax.jit`` to use for its results.

    The results of a program then have the same specs as arrays that are placed. By itself JAX would shorten the specs,
    and a program that takes first the one and then the other would be traced and compiled twice.
    """
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


# --- what a run says of itself ------------------------------------------------------------------------------------


def device_line(mesh: Mesh) -> str:
    """Describes the devices of a mesh in words: how many, of what kind, in how many processes."""
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    processes = len({device.process_index for device in mesh.devices.flat})
    where = f" in {processes} processes" if processes > 1 else ""
    fsdp = mesh.shape[FSDP_AXIS]
    cut = f" ({mesh.axis_names[0]} {mesh.size // fsdp}, fsdp {fsdp})" if fsdp > 1 else ""
    return f"{mesh.size} device{'s' if mesh.size > 1 else ''}{where}{cut} [{', '.join(kinds)}]"
