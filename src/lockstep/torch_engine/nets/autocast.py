"""Computes networks in bfloat16, by PyTorch's autocast; on tensors without memory, by casts that do the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

PRODUCTS = {torch.baddbmm, torch.bmm, functional.linear, functional.conv2d}
"""The functions that networks call and autocast gives bfloat16; custom networks aren't counted under it."""


def autocast(device: torch.device, enabled: bool = True) -> AbstractContextManager[Any]:
    """Makes products on a device use bfloat16, or not: ``torch.autocast``, or :class:`_OnShapes` on ``meta``."""
    if device.type == "meta":
        return _on_shapes(enabled)
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


_low: ContextVar[bool] = ContextVar("low", default=False)


@contextmanager
def _on_shapes(enabled: bool) -> Iterator[None]:
    before = _low.set(enabled)
    try:
        with _OnShapes():
            yield
    finally:
        _low.reset(before)


class _OnShapes(TorchFunctionMode):
    """Gives products bfloat16 by casts that are counted, and that have gradients as autocast's do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and _low.get():
            args, kwargs = pytree.tree_map(_cast, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _cast(x: Any) -> Any:
    return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
