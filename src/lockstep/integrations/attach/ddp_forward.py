"""Refuses forward passes through DDP whose own reduction would spoil what ``attach`` makes of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.torch_engine.distributed.scripts import ddp_in_forward


class DDPForward:
    """A hook on the forward passes of an attached module.

    In the backward pass behind its own forward DDP puts the ranks' mean into the gradients, after ``attach``: the same
    again where that averages too. Copies and pickles of the module refuse nothing.
    """

    def __init__(self, refuses: bool = False, summed: bool = False) -> None:
        self._refuses, self._summed = refuses, summed

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise a one-line ``ValueError`` where DDP will reduce otherwise."""
        if torch.compiler.is_compiling() or not self._refuses or not torch.is_grad_enabled():
            return
        ddp = ddp_in_forward()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        if self._summed:
            raise ValueError(
                "attach: reduction 'sum' is lost in a loss that went through DDP's forward: its mean takes its place; "
                "call the module that DDP wraps, or leave DDP out"
            )
        if ddp.gradient_as_bucket_view:
            raise ValueError(
                "attach: DDP(gradient_as_bucket_view=True) reduces the memory that attach reads, at the same time: "
                "leave that option or DDP out, or call the module that DDP wraps"
            )

    def __reduce__(self) -> tuple[type[DDPForward], tuple[()]]:
        return (DDPForward, ())
