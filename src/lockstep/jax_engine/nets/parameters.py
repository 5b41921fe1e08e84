"""Parameters by name and as one vector; with FSDP as slices over the mesh's ``fsdp`` axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.distributed.reductions import FSDP_AXIS, axes, gather_tree, sum_devices

Named = dict[str, Array]


@dataclass(frozen=True)
class ParameterLayout:
    """How parameters are held: one float32 vector ``[P]``, or with FSDP a dict of arrays, some of them cut.

    Attributes:
        shapes: of every parameter, in order.
        exact: whether gradients of shards are summed by the fixed tree; else a device sums its own, and then devices'
            sums are added.
        axes: with FSDP, the axis along which each parameter is cut over the mesh's ``fsdp`` axis, or None; empty
            without FSDP.
        synchronize: the user's own reduction in place of the framework's, see :mod:`lockstep.jax.task`: of this
            device's sum of gradients by name to that of all devices; None: ours. Without FSDP, and not ``exact``.
    """

    shapes: dict[str, tuple[int, ...]]
    exact: bool
    axes: dict[str, int | None] = field(default_factory=dict)
    synchronize: Callable[[Named], Named] | None = None

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def split(self, vector: Any) -> dict[str, Any]:
        """Views of a vector ``[P]`` by name."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            out[name] = vector[start : start + size].reshape(shape)
            start += size
        return out

    def join(self, named: Mapping[str, Any]) -> Array:
        """The vector of named arrays."""
        return jnp.concatenate([named[name].reshape(-1) for name in self.shapes])

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """What is held, whole and on the host, of arrays by name."""
        ordered = {name: np.asarray(arrays[name], np.float32).reshape(shape) for name, shape in self.shapes.items()}
        return ordered if self.axes else np.concatenate([array.ravel() for array in ordered.values()])

    def named(self, held: Any) -> Named:
        """Whole parameters by name, of what a device holds; with FSDP an all-gather over ``fsdp``."""
        if not self.axes:
            return self.split(held)
        return {
            name: x if self.axes[name] is None else lax.all_gather(x, FSDP_AXIS, axis=self.axes[name] or 0, tiled=True)
            for name, x in held.items()
        }

    def pack(self, gradient: Named, terms: Array) -> Any:
        """A block's gradient by name and loss terms ``[T]`` as one vector ``[P + T]``; with FSDP as they are."""
        return (gradient, terms) if self.axes else jnp.concatenate([self.join(gradient), terms])

    def reduce(self, packed: Any) -> tuple[Any, Array]:
        """The sum over all shards of what :meth:`pack` made: of each block ``[blocks, …]``, or summed ``[1, …]``.

        Returns:
            The gradient as parameters are held, and the terms ``[T]``; one collective, but for FSDP.
        """
        if self.axes:
            gradients, terms = packed
            return self._scattered({name: g.sum(0) for name, g in gradients.items()}), lax.psum(terms.sum(0), axes())
        if self.synchronize is not None:
            local = packed.sum(0)
            total = self.synchronize(self.split(local[: self.size]))
            return self.join(total), lax.psum(local[self.size :], axes())
        total = gather_tree(packed) if self.exact else sum_devices(packed.sum(0))
        return total[: self.size], total[self.size :]

    def _scattered(self, gradients: Named) -> Named:
        out = {}
        for name, gradient in gradients.items():
            axis = self.axes[name]
            if axis is None:
                out[name] = lax.psum(gradient, axes())
            else:
                part = lax.psum_scatter(gradient, FSDP_AXIS, scatter_dimension=axis, tiled=True)
                out[name] = lax.psum(part, axes()[0])
        return out

    def norm(self, gradient: Any) -> Array:
        """The global norm of a reduced gradient."""
        if not self.axes:
            return jnp.sqrt(jnp.square(gradient).sum())
        cut = [jnp.square(g).sum() for name, g in gradient.items() if self.axes[name] is not None]
        whole = [jnp.square(g).sum() for name, g in gradient.items() if self.axes[name] is None]
        total = sum(whole, jnp.zeros(()))
        return jnp.sqrt(total + lax.psum(sum(cut, jnp.zeros(())), FSDP_AXIS) if cut else total)
