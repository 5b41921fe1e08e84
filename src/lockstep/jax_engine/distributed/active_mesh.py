"""Keeps the active mesh, which functions use if they are given none; a call sets it, or a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

_GUARDS = tuple(f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host"))
"""JAX's settings of guards against transfers, each None if nobody has set it."""

_active: ContextVar[tuple[ActiveMesh, ...]] = ContextVar("lockstep_mesh", default=())


class ActiveMesh:
    """Makes a mesh the active one from the call on; a ``with`` block undoes that at its end.

    Several may be made before their blocks begin. The active mesh is the one that was made or entered last.

    Args:
        mesh: the mesh.
        for_jax: whether it becomes JAX's own mesh as well.
    """

    def __init__(self, mesh: Mesh, for_jax: bool) -> None:
        self.mesh, self._for_jax = mesh, for_jax
        self._before: jax.set_mesh | None = None
        """Restores the mesh that JAX had before."""
        self._blocks = 0
        self._begin()

    def _begin(self) -> None:
        if self._for_jax:
            self._before = jax.set_mesh(self.mesh)
        _active.set((*_active.get(), self))

    def _end(self) -> None:
        held = _active.get()
        if self not in held:
            return
        place = held.index(self)
        _active.set(held[:place] + held[place + 1 :])
        if self._before is None:
            return
        later = next((other for other in held[place + 1 :] if other._before is not None), None)
        if later is None:
            self._before.__exit__(None, None, None)
        else:  # JAX's mesh is a later one's: that one must restore what this one would have
            later._before = self._before
        self._before = None

    def __enter__(self) -> Mesh:
        self._blocks += 1
        if _active.get()[-1:] != (self,):
            self._end()
            self._begin()
        return self.mesh

    def __exit__(self, *_: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            self._end()


def set_mesh(mesh: Mesh) -> ActiveMesh:
    """Makes a mesh the active one for Lockstep and for JAX; a ``with`` block undoes that at its end."""
    return ActiveMesh(mesh, for_jax=True)


def activated(mesh: Mesh) -> ActiveMesh:
    """Makes a mesh the active one for Lockstep alone, so that new arrays aren't bound to its devices."""
    return ActiveMesh(mesh, for_jax=False)


def active_mesh() -> Mesh | None:
    """Returns the mesh that was activated last, of those whose block has not ended; None if there is none."""
    held = _active.get()
    return held[-1].mesh if held else None


@contextlib.contextmanager
def without_callers_context() -> Iterator[None]:
    """Hides what a caller has set for its own code: meshes, JAX's and Lockstep's, and guards against transfers.

    Nothing is mapped or cut over such a mesh, and what we read from devices isn't refused.
    """
    before = _active.set(())
    try:
        mesh = contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)
        guarded = any(getattr(jax.config, name) not in (None, "allow") for name in _GUARDS)
        with mesh, jax.transfer_guard("allow") if guarded else contextlib.nullcontext():
            yield
    finally:
        _active.reset(before)
