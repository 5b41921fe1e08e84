"""A graph of operations without a GPU: what work launches is recorded, and replayed on the same memory.

As with a CUDA graph no Python runs when it is replayed, and every operation reads and writes the memory that it had
when it was recorded. Who looks at a number meanwhile, or brings one from the host, gets CUDA's error. Branches are
replayed the last one first, and by turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.torch_engine.nets.shards import Calls, independently
from lockstep.torch_engine.setup.accelerator import WARM_UP, CaptureError

LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select")
INDEXING = ("aten::index.", "aten::index_put")
forks: list[int] = []
"""How many branches each fork of a captured graph had; for tests to clear."""
DOWN, UP = ("cpu", "numpy", "tolist"), ("tensor", "asarray", "from_numpy")
"""Methods that copy to the host, and functions that make tensors of what is there."""


def refused(*words: Any, **more: Any) -> Any:
    """Raises what PyTorch raises of CUDA."""
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def by_mask(args: Any) -> bool:
    """Whether a tensor is indexed by a mask: the host has to know how many rows are taken."""
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1])


class Recorder(TorchDispatchMode):
    """Keeps every operation with the tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(LOOKS) or (name.startswith(INDEXING) and by_mask(args)):
            refused()
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def in_branches(self, calls: Calls) -> list[Any]:
        """Records calls so that their operations are replayed by turns, those of the last call first."""
        forks.append(len(calls))
        first, branches, results = len(self.operations), [], []
        for call in calls:
            results.append(call())
            branches.append(self.operations[first:])
            del self.operations[first:]
        by_turns = zip_longest(*reversed(branches))
        self.operations.extend(operation for turn in by_turns for operation in turn if operation is not None)
        return results

    def replay(self) -> None:
        """Does the operations once more, on the same tensors."""
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def nothing_passes() -> Iterator[None]:
    """Refuses copies between the host and the device, which is the host here."""
    methods, functions = {name: getattr(Tensor, name) for name in DOWN}, {name: getattr(torch, name) for name in UP}
    try:
        for name in DOWN:
            setattr(Tensor, name, refused)
        for name, made in functions.items():
            setattr(torch, name, lambda x, _made=made, **more: _made(x, **more) if isinstance(x, Tensor) else refused())
        yield
    finally:
        for name, method in methods.items():
            setattr(Tensor, name, method)
        for name, function in functions.items():
            setattr(torch, name, function)


def capture(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Does what :func:`lockstep.torch_engine.setup.accelerator.capture` does.

    A capture launches nothing: what recording changed is for the caller to put back.
    """
    for _ in range(WARM_UP):
        work()
    recorder = Recorder()
    token = independently.set(recorder.in_branches)
    try:
        with nothing_passes(), recorder:
            work()
    except Exception as error:
        raise CaptureError(str(error)) from error
    finally:
        independently.reset(token)
    return recorder.replay
