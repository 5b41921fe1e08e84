"""Counts what PyTorch would launch on a device, by running the engine's own functions on tensors without memory.

On PyTorch's ``meta`` device an operation knows its result's shape and computes nothing, so that a policy of any size is
counted in a moment. Views are free; products are counted by PyTorch's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lockstep.torch_engine.nets.functions import Actor
from lockstep.training.costs import Kernel, Part, merged

FREE = {
    "detach",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
}


class StillActor(Actor):
    """Returns the same actions at every step, at no cost."""

    def __init__(self, actions: Tensor) -> None:
        self._actions = actions

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`; environments on the device don't call it."""
        raise NotImplementedError

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return self._actions


class CountingMode(TorchDispatchMode):
    """Records a kernel for each operation that runs under it, and counts the bytes of their results (``written``)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.written = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation, and counts it unless it returns a view."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE and not _is_view(func):
            self.kernels.append(_kernel(func, args, kwargs or {}, out))
            self.written += sum(_size(x) for x in _tensors(out))
        return out


def _is_view(func: Any) -> bool:
    """Returns whether an operation returns its argument's memory without writing it."""
    aliases = [x.alias_info for x in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _size(x: Tensor) -> float:
    """Returns the bytes of memory that a tensor spans; an expanded axis counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return float(count * x.element_size())


def _kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kernel:
    results = _tensors(out)
    read = _tensors((args, dict(kwargs)))
    moved = sum(_size(x) for x in read) + sum(_size(x) for x in results)
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.gather, torch.ops.aten.index_select):
        moved = 2 * sum(_size(x) for x in results) + sum(_size(x) for x in read[1:])
    counted = flop_registry.get(func.overloadpacket)
    if counted is not None:
        kind = "matmul_bf16" if results[0].dtype == torch.bfloat16 else "matmul"
        return Kernel(float(counted(*args, **kwargs, out_val=out)), moved, 1.0, kind)
    return Kernel(float(sum(x.numel() for x in results)), moved, 1.0)


def kernels_of(function: Callable[[], Any], times: float = 1.0) -> tuple[Kernel, ...]:
    """Counts what a call launches, multiplied by ``times``."""
    with CountingMode() as mode:
        function()
    return scaled(merged(mode.kernels), times)


def written(function: Callable[[], Any]) -> float:
    """Counts the bytes of all results of a call: the most that autograd keeps of a pass."""
    with CountingMode() as mode:
        function()
    return mode.written


def in_bf16(part: Part) -> Part:
    """Returns a part with products in bfloat16, if it was counted in float32."""
    return replace(part, kernels=tuple(k._replace(kind=k.kind.replace("matmul", "matmul_bf16")) for k in part.kernels))


def scaled(kernels: Iterable[Kernel], times: float) -> tuple[Kernel, ...]:
    """Returns kernels with ``times`` as many calls."""
    return tuple(kernel._replace(calls=kernel.calls * times) for kernel in kernels)
