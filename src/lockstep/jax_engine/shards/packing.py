"""Packs arrays with the same rows into one matrix of words, so that one copy moves them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

WIDE = {"bool": jnp.int32, "int8": jnp.int32, "int16": jnp.int32}
"""Dtypes whose elements take a word each, and the dtype that they are stored as."""


@dataclass(frozen=True)
class PackedLayout:
    """The layout of arrays ``[n, …]`` in a matrix ``[n, words]``: shape of one row and dtype of each, by name."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> PackedLayout:
        """Makes the layout of arrays (or of their shapes); a row's bytes (uint8) must be a multiple of four."""
        named = arrays.items()
        return cls({name: tuple(x.shape[1:]) for name, x in named}, {name: np.dtype(x.dtype) for name, x in named})

    def pack(self, arrays: Mapping[str, Array]) -> Array:
        """Packs arrays into a matrix, uint32 ``[n, words]``, bit by bit: nothing is rounded and NaNs are kept."""
        return jnp.concatenate([_words(arrays[name]) for name in self.shapes], 1)

    def unpack(self, words: Array) -> dict[str, Array]:
        """Unpacks arrays ``[…, *shape]`` by name from a matrix ``[…, words]`` with rows of this layout."""
        out = {}
        for name, columns in self._columns:
            shape, dtype, part = self.shapes[name], self.dtypes[name], words[..., columns]
            wide = WIDE.get(dtype.name)
            if wide is not None:
                part = lax.bitcast_convert_type(part, wide).astype(dtype)
            elif dtype != np.uint32:
                part = lax.bitcast_convert_type(part, dtype)
            out[name] = part.reshape(*words.shape[:-1], *shape)
        return out

    def on_host(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Unpacks arrays ``[n, *shape]`` by name from a matrix ``[n, words]`` on the host."""
        out = {}
        for name, columns in self._columns:
            dtype, part = self.dtypes[name], np.ascontiguousarray(words[:, columns])
            held = part.view(WIDE.get(dtype.name, dtype)).astype(dtype, copy=False)
            out[name] = held.reshape(len(words), *self.shapes[name])
        return out

    @cached_property
    def _columns(self) -> list[tuple[str, slice]]:
        """The columns of the matrix that each array takes."""
        out, start = [], 0
        for name, shape in self.shapes.items():
            dtype, size = self.dtypes[name], math.prod(shape)
            count = size if dtype.name in WIDE else size * dtype.itemsize // 4
            out.append((name, slice(start, start + count)))
            start += count
        return out


def _words(x: Array) -> Array:
    wide = WIDE.get(np.dtype(x.dtype).name)
    flat = (x if wide is None else x.astype(wide)).reshape(len(x), -1)
    if flat.dtype == jnp.uint8:
        flat = flat.reshape(len(x), -1, 4)
    return flat if flat.dtype == jnp.uint32 else lax.bitcast_convert_type(flat, jnp.uint32)
