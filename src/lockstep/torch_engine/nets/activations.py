"""Activations with a leading shard axis, and fast ones for passes without a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.torch_engine.nets.memory import on_host


def shard_by_shard(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a function that applies an elementwise function to each shard of ``[k, …]`` on its own.

    On a CPU the last elements of a tensor that don't fill a vector take a scalar path, which rounds differently for
    some functions. Which elements those are must not depend on the number of shards in the tensor. On an accelerator
    each element has its own thread.
    """

    def apply(x: Tensor) -> Tensor:
        alone = len(x) == 1 or not on_host(x.device)
        return function(x) if alone else torch.stack([function(part) for part in x])

    return apply


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": shard_by_shard(functional.elu),
    "silu": shard_by_shard(functional.silu),
    "gelu": shard_by_shard(functional.gelu),
}
"""Activations by name, for ``[k, rows, units]``."""


def _tanh(x: Tensor) -> Tensor:
    """Computes tanh in place; on a CPU with NumPy, whose tanh is vectorised."""
    if not on_host(x.device) or x.dtype == torch.bfloat16:  # NumPy has no bfloat16
        return x.tanh_()
    np.tanh(x.numpy(), out=x.numpy())
    return x


def fast_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation for passes without a graph; it may work in place."""
    return _tanh if name == "tanh" else ACTIVATIONS[name]
