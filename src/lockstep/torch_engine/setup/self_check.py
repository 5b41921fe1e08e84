"""Checks whether a shard's result depends on how many shards are batched with it, here, at the shapes of this run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.torch_engine.nets.shards import ShardFunction, by_shard, part_of

ALL_LOOKED_AT = 64
"""Up to this many shards, all are compared in groups of every size. Of more, the first so many and the last group are:
1,024 shards have 83 sizes, and each would go through all of them."""


def shard_invariant(
    function: ShardFunction, num_shards: int, *arguments: Any, sizes: Sequence[int] | None = None
) -> bool:
    """Returns whether ``function`` gives each shard the same bits alone and in groups of sizes that a rank may own.

    The arguments are tensors ``[num_shards, …]``, or dicts of them, at the shapes of the run; see :func:`by_shard`.
    ``sizes`` replaces the sizes of groups.
    """
    alone = _tensors(by_shard("loop", function, *arguments))
    for size in group_sizes(num_shards) if sizes is None else sizes:
        for start in group_starts(num_shards, size):
            together = _tensors(function(*(part_of(a, start, start + size) for a in arguments)))
            pieces = zip(alone, together, strict=True)
            if not all(_equal(a[start : start + size], b) for a, b in pieces):
                return False
    return True


def group_starts(num_shards: int, size: int) -> list[int]:
    """Returns the first shards of the groups of a size that are compared; see :data:`ALL_LOOKED_AT`."""
    looked_at = min(num_shards, ALL_LOOKED_AT)
    first = {*range(0, looked_at - size + 1, size), looked_at - size}
    return sorted({max(0, start) for start in first} | {num_shards - size})


def group_sizes(num_shards: int) -> list[int]:
    """Returns how many shards, more than one, a rank may own of ``num_shards``, on any number of ranks.

    Halves of what a rank owns are among them, because one may be inferred for while the other steps.
    """
    owned = (num_shards // ranks + more for ranks in range(1, num_shards + 1) for more in (0, num_shards % ranks > 0))
    return sorted({size for size in owned if size > 1})


def _tensors(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else torch.equal(a, b)
