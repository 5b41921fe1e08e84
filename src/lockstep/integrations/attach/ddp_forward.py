"""Refuses forward passes through DDP if its own reduction would spoil the gradients that ``attach`` has reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.torch_engine.distributed.scripts import ddp_in_forward


class DDPForward:
    """A forward pre-hook of an attached module that raises if DDP's reduction would conflict with ``attach``.

    After a forward through DDP, DDP's backward writes the mean over ranks into the gradients, after ``attach`` has
    reduced them. This is harmless if ``attach`` averages too. In copies and pickles of the module the hook is inactive.
    """

    def __init__(self, refuses: bool = False, summed: bool = False) -> None:
        self._refuses, self._summed = refuses, summed

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raises a one-line ``ValueError`` if DDP would replace a sum by a mean, or reduces the memory attach reads."""
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
