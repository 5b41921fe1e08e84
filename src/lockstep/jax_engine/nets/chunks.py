"""Chooses how many rows a gradient or the evaluation of a rollout takes at a time on a CPU, to stay in its caches.

The choice depends only on the network, the number of rows and the kind of device.
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
"""Least images in a chunk of an equal cut: smaller chunks cost more than one large pass."""

Result = TypeVar("Result")


def most_images(net: PolicyNet, platform: str) -> int | None:
    """Returns the most images that a pass takes at a time on a mesh's ``platform``; None if it isn't cut.

    A custom network isn't cut, because it may treat its rows in any way.
    """
    cut = platform == "cpu" and net.convolutional and net.custom is None
    return CHUNK_IMAGES if cut else None


def equal_chunks(net: PolicyNet, platform: str, rows: int) -> int:
    """Returns the number of equal chunks into which a feed-forward network's gradient of ``rows`` rows is cut.

    Chunks of vectors have 256 rows, chunks of images 8 to 32. It is 1 if no such cut is possible.
    """
    if platform != "cpu" or net.custom is not None:
        return 1
    least, most = (LEAST_IMAGES, CHUNK_IMAGES) if net.convolutional else (CHUNK_ROWS, CHUNK_ROWS)
    fewest = max(1, -(-rows // most))
    return next((chunks for chunks in range(fewest, rows // least + 1) if rows % chunks == 0), 1)


def in_chunks(function: Callable[[Array], Result], rows: Array, most: int | None) -> Result:
    """Calls a function of rows ``[n, …]`` that returns arrays ``[n, …]`` on at most ``most`` rows at a time.

    None: on all rows at once. Chunks have one size; the last is padded with zeros.
    """
    count = 1 if most is None else -(-len(rows) // most)
    if count <= 1:
        return function(rows)
    size = -(-len(rows) // count)
    filled = jnp.pad(rows, [(0, count * size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    results = lax.map(function, filled.reshape(count, size, *rows.shape[1:]))
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[: len(rows)], results)
