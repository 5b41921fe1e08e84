"""Rewrites a program that computes in bfloat16 for runtimes that can't: in float32, rounded where it was rounded.

PyTorch sums a product of bfloat16 in float32 and rounds the result once, and so do its other operations. A program of
float32 that rounds what each operation gives to bfloat16 has the same numbers, then, but for sums that lie so near the
middle between two of bfloat16's that their order decides which it is.
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
        program: of any operations of PyTorch's, also under autocast.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program = program.run_decompositions({}).module()  # in which autocast has become casts

    def forward(self, *tensors: Tensor) -> Any:
        """Takes and returns what the program does."""
        assert isinstance(self.program, fx.GraphModule)
        return _Rounding(self.program).run(*tensors)


class _Rounding(fx.Interpreter):
    """Runs a graph node by node; its values of bfloat16 are float32 here, and numbers of bfloat16's."""

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node with float32 in place of bfloat16; checks of dtypes and inputs are left out."""
        if n.op == "call_module" or n.target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        out, before = super().run_node(n), n.meta.get("val")
        if n.op == "output" or before is None or getattr(n.target, "is_view", False):  # views are of what is rounded
            return out
        return pytree.tree_map(_rounded, out, before)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes a node's arguments, and float32 for bfloat16 where a dtype is one of them."""
        return pytree.tree_map(lambda x: FULL if x is LOW else x, super().fetch_args_kwargs_from_env(n))


def _rounded(x: Any, before: Any) -> Any:
    """Rounds a result that was a tensor of bfloat16 ``before``."""
    return x.to(LOW).to(FULL) if isinstance(before, Tensor) and before.dtype is LOW else x
