"""Tells which numbers of shards have the bits that they have among all: ``bits_by_shards.py WORDS…``.

The words are those of ``lockstep train`` for engine torch. What the run's self-check calls is called once each: the
actor's output, evaluation, gradients. One line a function and number of shards is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.cli import main
from lockstep.torch_engine.nets.shards import part_of
from lockstep.torch_engine.setup import choose_mode

FUNCTIONS = 3
"""What the self-check calls with its first draw."""


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function of shards returned, in memory of its own."""
    return tuple(x.clone() for x in (result if isinstance(result, tuple) else (result,)))


def differences(function: Callable[..., Any], shards: int, *arguments: Any) -> Iterator[tuple[int, list[int]]]:
    """Counts how many elements of the first shard differ from those among all, in each result, by number of shards."""
    among_all = tensors(function(*(part_of(x, 0, shards) for x in arguments)))
    for count in range(1, shards + 1):
        found = tensors(function(*(part_of(x, 0, count) for x in arguments)))
        yield count, [int((a[0] != b[0]).sum()) for a, b in zip(among_all, found, strict=True)]


def run(words: list[str]) -> int:
    """Opens the run, and says what its self-check would look at."""
    called = 0

    def look(function: Callable[..., Any], shards: int, *arguments: Any) -> bool:
        nonlocal called
        called += 1
        if called <= FUNCTIONS:
            name = getattr(function, "__name__", "function").replace("<lambda>", "gradients")
            for count, differing in differences(function, shards, *arguments):
                print(f"{name}: {count} of {shards} shards: {', '.join(map(str, differing))} elements differ")
        return True

    choose_mode.shard_invariant = look
    return main(["train", *words])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
