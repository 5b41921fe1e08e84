"""Tells which numbers of shards have the bits that they have among all: ``bits_by_shards.py WORDS…``.

The words are those of ``lockstep train`` for engine torch. What the run's self-check calls is called for each number of
shards: the actor's output, evaluation, gradients. One line a function and number is printed, and nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.cli import main
from lockstep.torch_engine.nets.shards import part_of
from lockstep.torch_engine.setup import invariance

LAST = "gradients"
"""What the self-check calls last with its first draw."""


class Seen(BaseException):
    """All was looked at."""


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function of shards returned, in memory of its own."""
    return tuple(x.clone() for x in (result if isinstance(result, tuple) else (result,)))


def differences(function: Callable[..., Any], shards: int, *arguments: Any) -> Iterator[tuple[int, list[int]]]:
    """Counts elements that differ from those among all, in each result, by number of shards.

    Of the first so many shards, and of the last.
    """
    among_all = tensors(function(*(part_of(x, 0, shards) for x in arguments)))
    for count in range(1, shards + 1):
        differing = [0] * len(among_all)
        for first in {0, shards - count}:
            found = tensors(function(*(part_of(x, first, first + count) for x in arguments)))
            pairs = zip(among_all, found, strict=True)
            own = [int((a[first : first + count] != b).sum()) for a, b in pairs]
            differing = [a + b for a, b in zip(differing, own, strict=True)]
        yield count, differing


def run(words: list[str]) -> int:
    """Opens the run, says what its self-check would look at, and leaves it; returns the exit status."""

    def look(function: Callable[..., Any], shards: int, *arguments: Any) -> bool:
        name = getattr(function, "__name__", "function").replace("<lambda>", LAST)
        for count, differing in differences(function, shards, *arguments):
            print(f"{name}: {count} of {shards} shards: {', '.join(map(str, differing))} elements differ")
        if name == LAST:
            raise Seen
        return True

    invariance.shard_invariant = look
    try:
        return main(["train", *words])
    except Seen:
        return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
