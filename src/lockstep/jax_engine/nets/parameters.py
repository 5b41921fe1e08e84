"""Holds parameters as one vector on every device, or with FSDP as slices over the mesh's ``fsdp`` axis.

A session chooses one of the two layouts once; both have the same interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.distributed.mesh import REPLICATED, Specs, cut_along
from lockstep.jax_engine.distributed.placement import first_copy, gathered
from lockstep.jax_engine.distributed.reductions import (
    all_reduce,
    gather_slices,
    scatter_sum,
    sum_devices,
    sum_shards,
    sum_slices,
)

Named = dict[str, Array]
"""Arrays by a parameter's name, such as ``actor.0.weight`` ``[out, in]``."""

Held = Any
"""Parameters, a gradient or a moment as a layout holds it: a vector, or arrays by name."""


@dataclass(frozen=True)
class VectorLayout:
    """Holds parameters, their gradient and Adam's moments as float32 vectors ``[P]``, the same on every device.

    Attributes:
        shapes: of every parameter, in order.
        exact: whether gradients of shards are summed by the fixed tree; else each device sums its own shards, and then
            the devices' sums are added.
        synchronize: the user's own reduction, see :class:`lockstep.jax.task.Task`: takes this device's sum of gradients
            by name, returns that of all devices. None: the engine's reduction. Must be None if ``exact``.
    """

    shapes: dict[str, tuple[int, ...]]
    exact: bool
    synchronize: Callable[[Named], Named] | None = None

    @property
    def axes(self) -> dict[str, int | None]:
        """The axis along which each parameter is cut over the mesh's ``fsdp`` axis, or None; empty without FSDP."""
        return {}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def specs(self) -> Specs:
        """The specs of parameters on the mesh."""
        return REPLICATED

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Held:
        """Converts arrays by name to the form in which they are held, whole and on the host.

        Any shape of the right size will do.
        """
        return np.concatenate([array.ravel() for array in _ordered(self.shapes, arrays).values()])

    def named(self, held: Held) -> Named:
        """Returns whole parameters by name from what a device holds, inside a mapped program or on the host."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            out[name] = held[start : start + size].reshape(shape)
            start += size
        return out

    @cached_property
    def placed(self) -> Callable[[Held], Named]:
        """Returns arrays by name from parameters held on the mesh, outside a compiled program."""
        return jax.jit(self.named)

    def local(self, held: Held) -> Named:
        """Returns whole parameters by name on this process's first device; with FSDP a collective."""
        return self.placed(first_copy(held))

    def on_host(self, held: Held) -> dict[str, np.ndarray]:
        """Copies whole arrays by name to the host; with FSDP a collective."""
        return {name: np.array(array) for name, array in self.named(gathered(held)).items()}

    def _join(self, named: Named) -> Array:
        return jnp.concatenate([named[name].reshape(-1) for name in self.shapes])

    def pack(self, gradient: Named, terms: Array) -> Held:
        """Joins a block's gradient by name and its loss terms ``[T]`` for :meth:`reduce`: one vector ``[P + T]``."""
        return jnp.concatenate([self._join(gradient), terms])

    def reduce(self, packed: Held) -> tuple[Held, Array]:
        """Sums over all shards what :meth:`pack` returned: one row per block ``[blocks, …]``, or their sum ``[1, …]``.

        Returns:
            The gradient as parameters are held, and the terms ``[T]``; by one collective.
        """
        if self.synchronize is not None:
            local = packed.sum(0)
            total = self.synchronize(self.named(local[: self.size]))
            return self._join(total), all_reduce(local[self.size :])
        total = sum_shards(packed) if self.exact else sum_devices(packed.sum(0))
        return total[: self.size], total[self.size :]

    def norm(self, gradient: Held) -> Array:
        """Computes the global norm ``[]`` of a reduced gradient."""
        return jnp.sqrt(jnp.square(gradient).sum())


@dataclass(frozen=True)
class SlicedLayout:
    """Holds parameters by name, with large ones cut over the mesh's ``fsdp`` axis; see :class:`VectorLayout`."""

    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, int | None]
    size = VectorLayout.size
    synchronize = None  # a user's reduction would need whole gradients

    @property
    def specs(self) -> Specs:
        """See :attr:`VectorLayout.specs`."""
        return {name: REPLICATED if axis is None else cut_along(axis) for name, axis in self.axes.items()}

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Held:
        """See :meth:`VectorLayout.of_arrays`."""
        return _ordered(self.shapes, arrays)

    def named(self, held: Held) -> Named:
        """See :meth:`VectorLayout.named`: an all-gather over ``fsdp``."""
        return {name: x if (axis := self.axes[name]) is None else gather_slices(x, axis) for name, x in held.items()}

    def placed(self, held: Held) -> Named:
        """See :meth:`VectorLayout.placed`."""
        return {name: held[name] for name in self.shapes}

    def local(self, held: Held) -> Named:
        """See :meth:`VectorLayout.local`."""
        return {name: jnp.asarray(gathered(x)) for name, x in held.items()}

    def on_host(self, held: Held) -> dict[str, np.ndarray]:
        """See :meth:`VectorLayout.on_host`."""
        return {name: gathered(held[name]).copy() for name in self.shapes}

    def pack(self, gradient: Named, terms: Array) -> Held:
        """See :meth:`VectorLayout.pack`; returns the two unchanged."""
        return gradient, terms

    def reduce(self, packed: Held) -> tuple[Held, Array]:
        """See :meth:`VectorLayout.reduce`; a collective for each parameter."""
        gradients, terms = packed
        local = {name: g.sum(0) for name, g in gradients.items()}
        reduced = {
            name: all_reduce(g) if (axis := self.axes[name]) is None else scatter_sum(g, axis)
            for name, g in local.items()
        }
        return reduced, all_reduce(terms.sum(0))

    def norm(self, gradient: Held) -> Array:
        """See :meth:`VectorLayout.norm`."""
        cut = [jnp.square(g).sum() for name, g in gradient.items() if self.axes[name] is not None]
        whole = [jnp.square(g).sum() for name, g in gradient.items() if self.axes[name] is None]
        total = sum(whole, jnp.zeros(()))
        return jnp.sqrt(total + sum_slices(sum(cut, jnp.zeros(()))) if cut else total)


ParameterLayout = VectorLayout | SlicedLayout


def _ordered(shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(arrays[name], np.float32).reshape(shape) for name, shape in shapes.items()}
