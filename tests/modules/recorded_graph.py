"""A graph of operations without a GPU: what work launches is recorded, and replayed on the same memory.

As with a CUDA graph no Python runs when it is replayed, every operation reads and writes the memory that it had when it
was recorded, and who looks at a number meanwhile gets CUDA's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.torch_engine.setup.accelerator import WARM_UP, CaptureError

LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select")


class Recorder(TorchDispatchMode):
    """Keeps every operation with the tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(LOOKS):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Does the operations once more, on the same tensors."""
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def capture(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Does what :func:`lockstep.torch_engine.setup.accelerator.capture` does.

    A capture launches nothing: what recording changed is for the caller to put back.
    """
    for _ in range(WARM_UP):
        work()
    recorder = Recorder()
    try:
        with recorder:
            work()
    except Exception as error:
        raise CaptureError(str(error)) from error
    return recorder.replay
