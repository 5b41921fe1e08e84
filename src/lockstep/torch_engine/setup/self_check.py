"""Does a shard's result depend on how many shards are batched with it, here, at the shapes of this run?

``by_shard`` is how every function of shards is called: batched over all local shards where the check has passed,
one shard after the other where it has not. Slices are cloned: memory alignment may decide the last bits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

Mode = Literal["batched", "loop"]
ShardFunction = Callable[..., Any]


def by_shard(mode: Mode, function: ShardFunction, *arguments: Any) -> Any:
    """Call a function on all shards at once, or shard by shard with the results concatenated.

    Arrays of NumPy are taken like tensors.

    Args:
        mode: which of the two.
        function: of tensors ``[k, …]``, and of dicts of them.
        arguments: tensors ``[k, …]`` and dicts of them.
    """
    if mode == "batched":
        return function(*arguments)
    first = arguments[0]
    count = len(next(iter(first.values()))) if isinstance(first, dict) else len(first)
    results = [function(*(_part(a, s, s + 1) for a in arguments)) for s in range(count)]
    if isinstance(results[0], tuple):
        return tuple(_joined(parts) for parts in zip(*results, strict=True))
    return _joined(results)


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(list(parts))


def _part(argument: Any, first: int, last: int) -> Any:
    """Some of the shards, in memory of their own."""
    if isinstance(argument, dict):
        return {name: values[first:last].clone() for name, values in argument.items()}
    part = argument[first:last]
    return part.copy() if isinstance(part, np.ndarray) else part.clone()


def _tensors(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else torch.equal(a, b)


def _groups(num_shards: int) -> Iterator[int]:
    size = 2
    while size <= num_shards:
        yield size
        size *= 2


def shard_invariant(function: ShardFunction, num_shards: int, *arguments: Any) -> bool:
    """Whether ``function`` gives each shard the same bits alone and in aligned groups of 2, 4, … all shards.

    Args:
        function: takes tensors ``[k, …]`` (or dicts of them) and returns one or a tuple of them.
        num_shards: of the run.
        arguments: tensors ``[num_shards, …]`` (or dicts of them) at the shapes of the run.
    """
    alone = _tensors(by_shard("loop", function, *arguments))
    for size in _groups(num_shards):
        for start in range(0, num_shards, size):
            together = _tensors(function(*(_part(a, start, start + size) for a in arguments)))
            pieces = zip(alone, together, strict=True)
            if not all(_equal(a[start : start + size], b) for a, b in pieces):
                return False
    return True
