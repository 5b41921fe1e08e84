"""Makes active meshes, copies and keys for a mesh or a number of devices."""

from __future__ import annotations

from typing import Any, TypeVar

from jax import Array

from lockstep.jax.settings import SettingError
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement
from lockstep.jax_engine.distributed.mesh import ActiveMesh, Mesh, make_mesh

Tree = TypeVar("Tree")


def set_mesh(
    mesh: Mesh | int | None = None, num_devices: int | None = None, *, num_fsdp_devices: int | None = None
) -> ActiveMesh:
    """Makes a mesh the active one from the call on; at the end of a ``with`` block the former one is active again.

    Args:
        mesh: a mesh of :func:`make_mesh`, which also becomes JAX's own (``jax.set_mesh``): arrays that are made then
            lie on all its devices. If it is left out, or a number of fsdp devices, a mesh is made and JAX's own stays
            what it is, so that new arrays go wherever ``jax.jit(in_shardings=…)`` says.
        num_devices: number of devices of the mesh that is made; all by default.
        num_fsdp_devices: number of fsdp devices of the mesh that is made; 1 by default.

    Raises:
        ValueError: a mesh and numbers were given, or :func:`make_mesh` raises it; one line.
    """
    if isinstance(mesh, Mesh):
        if num_devices is not None or num_fsdp_devices is not None:
            raise ValueError("set_mesh: a mesh was given, and numbers of devices to make one; leave one of them out")
        return meshes.set_mesh(mesh)
    if mesh is not None and num_fsdp_devices is not None:
        raise ValueError(f"set_mesh: num_fsdp_devices was given twice: {mesh!r} and {num_fsdp_devices!r}")
    wanted = num_fsdp_devices if mesh is None else mesh
    return meshes.activated(make_mesh(1 if wanted is None else wanted, num_devices))


def replicate(pytree: Tree, mesh: Mesh | int | None = None, *, n_devices: int | None = None) -> Tree:
    """Copies every leaf to every device, along a new leading axis ``[num_devices, …]`` that is cut over the devices.

    Args:
        pytree: the same in every process; functions in it stay as they are.
        mesh: a mesh or a number of devices; by default the active mesh (:func:`set_mesh`), else all devices.
        n_devices: the number of devices, by name.

    Raises:
        ValueError: there are fewer devices, or they were given twice; one line.
    """
    return placement.replicate(pytree, _mesh_of("replicate", mesh, n_devices))


def split_key_across_devices(key: Array, n: int | None = None, *, n_devices: int | None = None) -> Array:
    """Makes a random key for each device: ``jax.random.split(key, n)``, one on each.

    Args:
        key: typed (``jax.random.key``) or raw (``jax.random.PRNGKey``), the same in every process.
        n: number of devices; by default those of the active mesh, else all.
        n_devices: the same, by another name.

    Raises:
        ValueError: there are fewer devices, or they were given twice; one line.
    """
    if not hasattr(key, "dtype"):
        raise SettingError(f"key: {type(key).__name__} was given; give one of jax.random.key")
    return placement.split_key_across_devices(key, _once("split_key_across_devices", n, n_devices))


def _mesh_of(name: str, given: Any, n_devices: int | None) -> Mesh | None:
    wanted = _once(name, given, n_devices)
    return wanted if wanted is None or isinstance(wanted, Mesh) else make_mesh(num_devices=wanted)


def _once(name: str, given: Any, n_devices: int | None) -> Any:
    if given is not None and n_devices is not None:
        raise ValueError(f"{name}: n_devices was given twice: {given!r} and {n_devices!r}")
    return n_devices if given is None else given
