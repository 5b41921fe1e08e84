"""The mesh that functions take which are given none: set by a call, or for a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

_active: ContextVar[tuple[ActiveMesh, ...]] = ContextVar("lockstep_mesh", default=())


class ActiveMesh:
    """A mesh that is the active one from the call on; a ``with`` block undoes that at its end.

    Several may be made before their blocks begin: the last one that was made or entered is the active one.

    Args:
        mesh: which.
        for_jax: it becomes JAX's own as well.
    """

    def __init__(self, mesh: Mesh, for_jax: bool) -> None:
        self.mesh, self._for_jax = mesh, for_jax
        self._before: jax.set_mesh | None = None
        """What puts back JAX's mesh of before."""
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
        else:  # JAX's mesh is a later one's, which was made in this one's time and goes back beyond it
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
    """Makes a mesh the active one, for Lockstep and for JAX; a ``with`` block undoes it at its end."""
    return ActiveMesh(mesh, for_jax=True)


def activated(mesh: Mesh) -> ActiveMesh:
    """Makes a mesh the active one for Lockstep alone: arrays that are made then aren't bound to its devices."""
    return ActiveMesh(mesh, for_jax=False)


def active_mesh() -> Mesh | None:
    """Gives the mesh that :func:`set_mesh` set last, of those whose block hasn't ended; or None."""
    held = _active.get()
    return held[-1].mesh if held else None


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Takes meshes away that a caller may have set, JAX's and Lockstep's: nothing is mapped over, or cut for, them."""
    before = _active.set(())
    try:
        with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None):
            yield
    finally:
        _active.reset(before)
