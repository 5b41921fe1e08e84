"""Sums over a shard's rows that don't depend on how many shards there are; on an accelerator, products with ones.

PyTorch's own reduction splits a sum among more or fewer blocks of threads, depending on how many sums there are: on an
H100 the same rows got other last bits with two shards than with eight. A batched product is split within each of its
matrices. On a CPU the sums are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.torch_engine.losses import summed
from lockstep.torch_engine.nets.memory import on_host


class _SpreadOverRows(torch.autograd.Function):
    """Repeats numbers ``[k, width]`` for each of ``n`` rows; the gradient is a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x.unsqueeze(1).expand(-1, rows, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return summed_by_product(grad), None


def summed_by_product(x: Tensor) -> Tensor:
    """Sums ``[k, n, width]`` over rows to ``[k, width]``: ones times each shard's matrix.

    A product of a single column is computed as one of two, because how single ones are computed depends more on the
    number of shards.
    """
    shards, rows, width = x.shape
    if width == 1:
        x = torch.nn.functional.pad(x, (0, 1))
    return torch.bmm(x.new_ones((1, 1, rows)).expand(shards, 1, rows), x)[:, 0, :width]


def over_rows(x: Tensor, rows: int) -> Tensor:
    """Adds a row axis to each shard's numbers ``[k, width]``, along which they broadcast: ``[k, 1 or rows, width]``."""
    asked = torch.is_grad_enabled() and x.requires_grad
    if on_host(x.device) or torch.compiler.is_compiling() or not asked:  # what is compiled is called for one shard
        return x.unsqueeze(1)
    return _SpreadOverRows.apply(x, rows)  # pyright: ignore[reportReturnType]


def sums_of_rows(columns: list[Tensor]) -> Tensor:
    """Sums columns as :func:`lockstep.torch_engine.losses.summed` does."""
    if on_host(columns[0].device) or torch.compiler.is_compiling():
        return summed(columns)
    return summed_by_product(torch.stack(columns, -1))
