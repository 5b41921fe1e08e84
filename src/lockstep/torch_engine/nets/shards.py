"""Lays out samples of shards in memory, and calls functions of shards on them.

``by_shard`` calls every function of shards: batched over all local shards if the self-check has passed
(:mod:`lockstep.torch_engine.setup.self_check`), else one shard after the other. Slices are cloned, because memory
alignment may decide the last bits too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Mode = Literal["batched", "loop"]
ShardFunction = Callable[..., Any]
Calls = Sequence[Callable[[], Any]]


def one_by_one(calls: Calls) -> list[Any]:
    """Calls functions one after the other."""
    return [call() for call in calls]


independently: ContextVar[Callable[[Calls], list[Any]]] = ContextVar("independently", default=one_by_one)
"""How to call functions that don't depend on one another, such as those of a loop over shards: one after the other or,
while a graph is captured, as its branches (:func:`lockstep.torch_engine.setup.accelerator.capture`)."""


def by_shard(mode: Mode, function: ShardFunction, *arguments: Any) -> Any:
    """Calls a function on all shards at once, or shard by shard with the results concatenated.

    The arguments are tensors or NumPy arrays ``[k, …]``, and dicts of them.
    """
    if mode == "batched":
        return function(*arguments)
    first = arguments[0]
    count = len(next(iter(first.values()))) if isinstance(first, dict) else len(first)

    def called(shard: int) -> Any:
        return function(*(part_of(a, shard, shard + 1) for a in arguments))

    results = independently.get()([partial(called, shard) for shard in range(count)])
    if isinstance(results[0], tuple):
        return tuple(_joined(parts) for parts in zip(*results, strict=True))
    return _joined(results)


def shards_within(part: slice | None, rows: int) -> slice:
    """Returns the shards, of ``rows`` environments each, that a part of a rank's environments is; None: all of them."""
    return slice(None) if part is None else slice(part.start // rows, part.stop // rows)


def part_of(argument: Any, first: int, last: int) -> Any:
    """Copies the shards from ``first`` up to ``last`` of an array, a tensor, or a dict of tensors."""
    if isinstance(argument, dict):
        return {name: values[first:last].clone() for name, values in argument.items()}
    part = argument[first:last]
    return part.copy() if isinstance(part, np.ndarray) else part.clone()


def in_pairs(x: Tensor) -> Tensor:
    """Repeats the only shard of a tensor: ``[1, …]`` to ``[2, …]``."""
    return x.expand(2, *x.shape[1:])


def parts_of(shards: int, most: int) -> list[tuple[int, int]]:
    """Cuts shards into runs ``(first, after the last)`` of powers of two, at most ``most``, which is one too."""
    parts, first = [], 0
    while first < shards:
        size = min(most, 1 << (shards - first).bit_length() - 1)
        parts.append((first, first + size))
        first += size
    return parts


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(list(parts))


def aligned(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copies an array to a new tensor, because a product's last bits may depend on its input's place in memory."""
    tensor = torch.as_tensor(array)
    return tensor.clone() if tensor.device.type == device.type else tensor.to(device)


def to_shards(x: Tensor, num_shards: int) -> Tensor:
    """Joins each shard's part of ``[T, k·rows, …]``: ``[k, T·rows, …]``.

    The result is a contiguous copy; with one row a shard it is a view, in which a shard's samples lie ``k`` apart.
    """
    steps, envs = x.shape[:2]
    rows = envs // num_shards
    parts = x.view(steps, num_shards, rows, *x.shape[2:]).transpose(0, 1)
    return parts.reshape(num_shards, steps * rows, *x.shape[2:])


def laid_out(x: Tensor, num_shards: int) -> Tensor:
    """Does what :func:`to_shards` does for two steps or more, always as one contiguous copy; see :func:`aligned`."""
    own = x.clone(memory_format=torch.contiguous_format) if num_shards == 1 else x
    return to_shards(own, num_shards).contiguous()


def from_shards(x: Tensor, steps: int) -> Tensor:
    """Reverses :func:`to_shards`: ``[k, T·rows]`` to ``[T, k·rows]``."""
    shards = len(x)
    return x.view(shards, steps, -1).transpose(0, 1).reshape(steps, -1)


def to_sequences(x: Tensor, steps: int, length: int) -> Tensor:
    """Cuts ``[k, T·rows, …]`` into sequences of one environment each: ``[k, T/L · rows, L, …]``."""
    k, samples = x.shape[:2]
    rows = samples // steps
    parts = x.view(k, steps // length, length, rows, *x.shape[2:]).transpose(2, 3)
    return parts.reshape(k, samples // length, length, *x.shape[2:])
