"""Does a shard's result depend on how many shards are batched with it, here, at the shapes of this run?

``by_shard`` is how every function of shards is called: batched over all local shards where the check has passed,
one shard after the other where it has not. Slices are cloned: memory alignment may decide the last bits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Mode = Literal["batched", "loop"]
ShardFunction = Callable[..., Any]


def by_shard(mode: Mode, function: ShardFunction, *arguments: Tensor) -> Any:
    """Call a function of ``[k, …]`` tensors on all shards at once, or shard by shard with the results concatenated."""
    if mode == "batched":
        return function(*arguments)
    results = [function(*(a[s : s + 1].clone() for a in arguments)) for s in range(len(arguments[0]))]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
    return torch.cat(results)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _groups(num_shards: int) -> Iterator[int]:
    size = 2
    while size <= num_shards:
        yield size
        size *= 2


def shard_invariant(function: ShardFunction, *arguments: Tensor) -> bool:
    """Whether ``function`` gives each shard the same bits alone and in aligned groups of 2, 4, … all shards.

    Args:
        function: takes tensors ``[k, …]`` and returns one or a tuple of them.
        arguments: tensors ``[num_shards, …]`` at the shapes of the run.
    """
    num_shards = len(arguments[0])
    alone = _tensors(by_shard("loop", function, *arguments))
    for size in _groups(num_shards):
        for start in range(0, num_shards, size):
            together = _tensors(function(*(a[start : start + size].clone() for a in arguments)))
            pieces = zip(alone, together, strict=True)
            if not all(torch.equal(a[start : start + size], b) for a, b in pieces):
                return False
    return True
