"""An accelerator that isn't there: a PyTorch device in pure Python, whose memory the host can't see.

What would be wrong on a GPU is an error here: a tensor of the host meets one of the device, NumPy looks at the device's
memory. What would be slow there is counted: copies either way, and operations that make the host wait. Built on the
PrivateUse1 key (``torch.utils.backend_registration``; experimental). What it can't stand in for is listed in
docs/gpu.md. Run as a script it is the command ``lockstep``, whose ``--device xpu`` is this device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "emulated"
UP, DOWN, WAITS = "to the device", "to the host", "waits"
count: Counter[str] = Counter()
"""Copies to the device, reads by the host (each of which waits), what waits otherwise, and operations.

A copy to the device waits unless it was said not to: then the memory that it is from must be the device's to read.
"""

WAITING = ("aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::scatter")
"""Operations whose result's shape or value the host needs before it can go on, and those that may need it on some
device where kernels have to repeat their bits."""


class Module(_DummyBackendModule):
    """What ``torch.cuda`` is for CUDA: what a run asks of its module. A process sees two, and uses one."""

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        count[WAITS] += 1

    def get_device_name(self, device: Any = None) -> str:
        return "an emulated accelerator"

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


class OnDevice(Tensor):
    """What lies on the device; ``raw`` is its memory, which nobody but the device may touch."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        assert not isinstance(raw, OnDevice), "memory of a device's memory"
        made = Tensor._make_wrapper_subclass(cls, raw.size(), device=f"{NAME}:0", **layout)  # pyright: ignore[reportArgumentType]
        made.raw = raw
        return made

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("NumPy can't look at a device's memory")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.name()
        count["operations"] += 1
        if name == "aten::_to_copy":
            return _moved(func, args[0], kwargs)
        if name == "aten::_local_scalar_dense":
            count[DOWN] += 1
            return func(args[0].raw)
        if name == "aten::copy_":
            return _copied(*args)
        if name.startswith(WAITING) or (name == "aten::index.Tensor" and _by_mask(args[1])):
            count[WAITS] += 1
        return _computed(func, args, kwargs)


def _moved(func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Copies a tensor of the device to where it is asked for."""
    assert isinstance(source, OnDevice)
    wanted = kwargs.pop("device", None)
    if wanted is not None and torch.device(wanted).type == "cpu":
        count[DOWN] += 1
        return func(source.raw, **kwargs)
    return OnDevice(func(source.raw, **kwargs))


def _copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies in place, within the device's memory or from or to the host's."""
    inside, outside = isinstance(to, OnDevice), isinstance(source, OnDevice)
    if inside and not outside:
        count[UP] += 1
        count[WAITS] += not non_blocking
    if outside and not inside:
        count[DOWN] += 1
    (to.raw if isinstance(to, OnDevice) else to).copy_(source.raw if isinstance(source, OnDevice) else source)
    return to


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Does an operation on the device's memory; a tensor of the host's must have been copied first.

    Arguments and results are tensors and lists of them, walked through by hand: it is done for every operation.
    """
    own: dict[int, OnDevice] = {}

    def inside(x: Any) -> Any:
        if isinstance(x, OnDevice):
            own[id(x.raw)] = x
            return x.raw
        if isinstance(x, Tensor):  # a scalar, too: many operations would copy it, and wait
            raise RuntimeError(f"{func.name()}: a tensor in the host's memory met one on the device")
        return [inside(y) for y in x] if isinstance(x, (list, tuple)) else x

    def outside(x: Any) -> Any:
        if isinstance(x, Tensor):
            return own[id(x)] if id(x) in own else OnDevice(x)  # in place: the operation returns its own tensor
        return type(x)(outside(y) for y in x) if type(x) in (list, tuple) else x

    plain = {name: inside(x) for name, x in kwargs.items()}
    if "device" in plain:
        plain["device"] = "cpu"
    return outside(func(*(inside(x) for x in args), **plain))


def _registered() -> None:
    """Tells PyTorch of the device, once a process."""
    _setup_privateuseone_for_python_backend(NAME, Module())

    @torch.library.impl("aten::empty.memory_format", "privateuseone")
    def _(size: Any, dtype: Any = None, **_: Any) -> Any:
        return OnDevice(torch.empty(size, dtype=dtype))

    @torch.library.impl("aten::empty_strided", "privateuseone")
    def _(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Any:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    @torch.library.impl("aten::_copy_from", "privateuseone")
    def _(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
        return _copied(to, source, non_blocking)


_registered()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what happens inside."""
    before, out = Counter(count), Counter[str]()
    yield out
    out.update({name: number - before[name] for name, number in count.items() if number != before[name]})


def main() -> int:
    """Runs ``lockstep`` with this device as ``--device xpu``."""
    from lockstep.cli import main as lockstep
    from lockstep.torch_engine.setup import accelerator

    accelerator.TYPES["xpu"] = NAME
    accelerator.take_device = lambda device, local_rank: torch.device(NAME, 0)  # autograd knows of one
    return lockstep(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
