"""Rewrites a program that computes in bfloat16 for runtimes that can't: in float32, rounded where it was rounded.

PyTorch sums a product of bfloat16 in float32 and rounds the result once; its other operations do likewise. So a float32
program that rounds each operation's result to bfloat16 computes the same numbers. Only a sum that lies very near the
middle between two bfloat16 numbers may differ, because there the order of addition decides how it is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

LOW, FULL = torch.bfloat16, torch.float32


class RoundedModule(nn.Module):
    """Runs a program in float32, and rounds to bfloat16 what was bfloat16 there.

    Args:
        program: may have any of PyTorch's operations, also under autocast.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program = program.run_decompositions({}).module()  # which turns autocast into casts

    def forward(self, *tensors: Tensor) -> Any:
        """Runs the program; takes its inputs and returns its outputs."""
        assert isinstance(self.program, fx.GraphModule)
        return _Rounding(self.program).run(*tensors)


class _Rounding(fx.Interpreter):
    """Runs a graph node by node; its bfloat16 values are float32 here, rounded to bfloat16 numbers."""

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node with float32 in place of bfloat16; skips checks of dtypes and inputs."""
        if n.op == "call_module" or n.target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        out, before = super().run_node(n), n.meta.get("val")
        if n.op == "output" or before is None or getattr(n.target, "is_view", False):  # views are rounded already
            return out
        return pytree.tree_map(_rounded, out, before)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a node's arguments, with float32 for bfloat16 if a dtype is one of them."""
        return pytree.tree_map(lambda x: FULL if x is LOW else x, super().fetch_args_kwargs_from_env(n))


def _rounded(x: Any, before: Any) -> Any:
    """Rounds a result if it was a bfloat16 tensor ``before``."""
    return x.to(LOW).to(FULL) if isinstance(before, Tensor) and before.dtype is LOW else x
