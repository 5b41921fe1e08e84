"""How many rows a gradient, or the evaluation of a rollout, takes at a time on a CPU, for the sake of its caches.

What is chosen depends on the network, the number of rows and the kind of device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.networks.spec import PolicyNet

CHUNK_ROWS, CHUNK_IMAGES = 256, 32
LEAST_IMAGES = 8
"""Of a chunk whose size isn't chosen freely: a few at a time cost more than many do."""

Result = TypeVar("Result")


def most_images(net: PolicyNet, platform: str) -> int | None:
    """Gives the most images that a pass takes at a time on a mesh's ``platform``; None: it isn't cut.

    A network of the user's own is not: what it does with its rows is its own affair.
    """
    cut = platform == "cpu" and net.convolutional and net.custom is None
    return CHUNK_IMAGES if cut else None


def equal_chunks(net: PolicyNet, platform: str, rows: int) -> int:
    """Counts the chunks of one size that a feed-forward network's gradient of so many rows is cut into.

    Of vectors they have 256 rows; of images 32 at most, and 8 at least. It is one where that can't be.
    """
    if platform != "cpu" or net.custom is not None:
        return 1
    least, most = (LEAST_IMAGES, CHUNK_IMAGES) if net.convolutional else (CHUNK_ROWS, CHUNK_ROWS)
    fewest = max(1, -(-rows // most))
    return next((chunks for chunks in range(fewest, rows // least + 1) if rows % chunks == 0), 1)


def in_chunks(function: Callable[[Array], Result], rows: Array, most: int | None) -> Result:
    """Calls a function of rows ``[n, …]``, which gives arrays ``[n, …]``, for at most ``most`` at a time (None: all).

    Chunks are of one size; what the last one lacks are zeros.
    """
    count = 1 if most is None else -(-len(rows) // most)
    if count <= 1:
        return function(rows)
    size = -(-len(rows) // count)
    filled = jnp.pad(rows, [(0, count * size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    results = lax.map(function, filled.reshape(count, size, *rows.shape[1:]))
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[: len(rows)], results)
