"""Several arrays of the same rows as one matrix of words: one copy moves them all, where each copy costs a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

WIDE = {"bool": jnp.int32, "int8": jnp.int32, "int16": jnp.int32}
"""Types that take a word each, and as what."""


@dataclass(frozen=True)
class Words:
    """Where arrays ``[n, …]`` lie in a matrix ``[n, words]``: the shapes of one row of each, and dtypes, by name."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Words:
        """Gives the layout of arrays (or their shapes); bytes must come in fours."""
        named = arrays.items()
        return cls({name: tuple(x.shape[1:]) for name, x in named}, {name: np.dtype(x.dtype) for name, x in named})

    def pack(self, arrays: Mapping[str, Array]) -> Array:
        """Gives the matrix, uint32 ``[n, words]``; its bits are the arrays', so nothing rounds and no NaN is lost."""
        return jnp.concatenate([_words(arrays[name]) for name in self.shapes], 1)

    def unpack(self, words: Array) -> dict[str, Array]:
        """Arrays ``[…, *shape]`` by name, of a matrix ``[…, words]`` with rows of this layout."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            dtype, size = self.dtypes[name], int(np.prod(shape))
            wide = WIDE.get(dtype.name)
            count = size if wide is not None else size * dtype.itemsize // 4
            part = words[..., start : start + count]
            start += count
            if wide is not None:
                part = lax.bitcast_convert_type(part, wide).astype(dtype)
            elif dtype != np.uint32:
                part = lax.bitcast_convert_type(part, dtype)
            out[name] = part.reshape(*words.shape[:-1], *shape)
        return out

    def on_host(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays ``[n, *shape]`` by name, of a matrix ``[n, words]`` on the host."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            dtype, size = self.dtypes[name], int(np.prod(shape))
            held = dtype if dtype.name not in WIDE else np.dtype(np.int32)
            part = np.ascontiguousarray(words[:, start : (start := start + size * held.itemsize // 4)])
            out[name] = part.view(held).astype(dtype, copy=False).reshape(len(words), *shape)
        return out


def _words(x: Array) -> Array:
    wide = WIDE.get(np.dtype(x.dtype).name)
    flat = (x if wide is None else x.astype(wide)).reshape(len(x), -1)
    if flat.dtype == jnp.uint8:
        flat = flat.reshape(len(x), -1, 4)
    return flat if flat.dtype == jnp.uint32 else lax.bitcast_convert_type(flat, jnp.uint32)
