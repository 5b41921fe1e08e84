"""Whether a shard's result depends on how many shards are batched with it, here, at the shapes of this run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.torch_engine.nets.shards import ShardFunction, by_shard, part_of


def shard_invariant(function: ShardFunction, num_shards: int, *arguments: Any) -> bool:
    """Tells whether ``function`` gives each shard the same bits alone and in aligned groups of 2, 4, … all shards.

    The arguments are tensors ``[num_shards, …]``, or dicts of them, at the shapes of the run; see :func:`by_shard`.
    """
    alone = _tensors(by_shard("loop", function, *arguments))
    for size in (2**n for n in range(1, num_shards.bit_length())):
        for start in range(0, num_shards, size):
            together = _tensors(function(*(part_of(a, start, start + size) for a in arguments)))
            pieces = zip(alone, together, strict=True)
            if not all(_equal(a[start : start + size], b) for a, b in pieces):
                return False
    return True


def _tensors(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else torch.equal(a, b)
