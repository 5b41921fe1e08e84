"""Accelerators: every call that is specific to a kind of device is here, and nowhere else in this engine.

CUDA, ROCm (whose PyTorch calls its devices ``cuda``) and XPU are used in the same way: through ``torch.accelerator``
and the device's own module, ``torch.cuda`` or ``torch.xpu``, which have the same names. :func:`check_accelerator` says
what a device lacks before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.engines import VISIBLE
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.shards import Calls, independently, one_by_one

TYPES = {"cuda": "cuda", "xpu": "xpu"}
"""PyTorch's device type of each ``device`` of a config that is an accelerator of this engine; tests add theirs."""
PREFERRED = ("cuda", "xpu")
"""What ``device: auto`` takes: the first that is here, else the CPU."""
FULL_TYPES = ("cuda", "xpu")
"""PyTorch's types of devices with generators of their own, and copies to and from page-locked memory. Which generator
draws follows from it."""
GRAPHS = ("CUDAGraph", "XPUGraph")
NEEDED = ("device_count", "current_device", "set_device", "synchronize", "get_device_name", "get_rng_state")
"""What a run needs of a device's module, whatever its settings."""
WARM_UP = 3
"""Calls before one is captured as a graph, so that libraries have chosen and allocated what they keep."""
BRANCHES = 8
"""Branches of a graph for calls that don't depend on one another; the device may run as many side by side. Each has a
stream, for which the library of products keeps memory of its own."""


# --- before anything starts -------------------------------------------------------------------------------------------


def module_of(device: str) -> Any:
    """Returns the module of a config's device, or None if this PyTorch has none."""
    return getattr(torch, TYPES[device], None)


def count_devices(device: str) -> int:
    """Counts the devices of a config's kind that PyTorch sees here."""
    module = module_of(device)
    return module.device_count() if module is not None and module.is_available() else 0


def chosen_device() -> str:
    """Chooses what ``device: auto`` means on this machine: the first of :data:`PREFERRED` that lacks nothing."""
    return next((name for name in PREFERRED if count_devices(name) and not lacking(name)), "cpu")


def lacking(device: str) -> list[str]:
    """Lists what the visible devices of a kind lack and every run needs."""
    module = module_of(device)
    out = [name for name in NEEDED if not hasattr(module, name)]
    properties = getattr(module, "get_device_properties", None)
    seen = [] if properties is None else [properties(n) for n in range(count_devices(device))]
    if not all(getattr(each, "has_fp64", True) for each in seen):
        out.append("float64, in which the shards' statistics are combined")
    return out


def check_accelerator(device: str, ranks: int, graphs: bool = False) -> None:
    """Checks that this machine has the accelerators that ``ranks`` need, and ``graphs`` if they are asked for.

    Raises:
        ValueError: if it doesn't; one line that names what is missing.
    """
    visible = count_devices(device)
    if not visible:
        raise ValueError(
            f"device: {device}, but PyTorch {torch.__version__} sees no {device.upper()} device here; use --device cpu"
        )
    if ranks > visible:
        raise ValueError(
            f"nproc: {ranks} ranks need {ranks} GPUs and {visible} are visible ({VISIBLE[device]}); use {visible}"
        )
    if missing := lacking(device):
        raise ValueError(f"device: {device} lacks {', '.join(missing)}; use --device cpu")
    if graphs and not has_graphs(device):
        raise ValueError(
            f"cuda_graphs: true, but PyTorch {torch.__version__} has no graphs of {device.upper()} devices; use "
            "cuda_graphs false"
        )


def has_graphs(device: str) -> bool:
    """Returns whether PyTorch can capture graphs of a config's kind of device."""
    return any(hasattr(module_of(device), name) for name in GRAPHS)


def memory_of(device: str) -> int:
    """Returns the bytes of the smallest visible device of a kind."""
    module = module_of(device)
    return min(module.get_device_properties(n).total_memory for n in range(module.device_count()))


def names_of_ranks(device: str, ranks: int) -> list[str]:
    """Returns PyTorch's names of the devices of this host's ranks."""
    return [f"{TYPES[device]}:{rank}" if device in TYPES else "cpu" for rank in range(ranks)]


# --- a rank's own -----------------------------------------------------------------------------------------------------


def take_device(device: str, local_rank: int) -> torch.device:
    """Makes a host's ``local_rank``-th accelerator this process's current one, and returns it."""
    module_of(device).set_device(local_rank)
    return torch.device(TYPES[device], local_rank)


def current_device(device: str) -> torch.device:
    """Returns the accelerator that :func:`take_device` took; ``cpu`` is the CPU."""
    if device not in TYPES:
        return torch.device(device)
    return torch.device(TYPES[device], module_of(device).current_device())


def pin_down_kernels(deterministic: bool, warn_only: bool) -> None:
    """Turns off what makes kernels depend on time, or shortens mantissas; on accelerators makes them deterministic."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        # else every new tensor costs one more kernel
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _module(device: torch.device) -> Any:
    """Returns the module of a device; None for the CPU, which needs no waiting."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def platform_version(device: torch.device) -> str:
    """Returns which CUDA and cuDNN, or ROCm, PyTorch computes with on a device; empty for other kinds."""
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def name_of(device: torch.device) -> str:
    """Returns the maker's name of a device; ``cpu`` for the CPU."""
    return "cpu" if device.type == "cpu" else _module(device).get_device_name(device)


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all work that it was given."""
    if device.type != "cpu":
        _module(device).synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Returns the most MiB of a device's memory that PyTorch has held; 0 if it doesn't say."""
    most = getattr(_module(device), "max_memory_allocated", None)
    return 0.0 if most is None else most(device) / 2**20


def generator(device: torch.device) -> torch.Generator | None:
    """Makes a counter-based generator on a device; None if it has none of its own, and the host draws."""
    return torch.Generator(device) if device.type in FULL_TYPES else None


def generator_state(device: torch.device) -> Tensor | None:
    """Returns the state of a device's global generator; None for the CPU, whose generator is PyTorch's own."""
    return None if device.type == "cpu" else _module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor | None) -> None:
    """Sets the state that :func:`generator_state` returned."""
    if state is not None:
        _module(device).set_rng_state(state, device)


# --- copies that nobody waits for -------------------------------------------------------------------------------------


def pins(device: torch.device) -> bool:
    """Returns whether a device copies to and from page-locked host memory while the host goes on."""
    return device.type in FULL_TYPES


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a tensor of zeros on the host, page-locked if the device can copy such memory by itself."""
    return torch.zeros(shape, dtype=dtype, pin_memory=pins(device))


def upload(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copies a host's array to new memory on a device; the host doesn't wait unless it must."""
    tensor = torch.as_tensor(array)
    if device.type == "cpu":
        return tensor.clone()
    return (tensor.pin_memory() if pins(device) else tensor).to(device, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Moves a host's array to the policy's device: the same memory on the host, else as :func:`upload` does."""
    return torch.from_numpy(array) if on_host(device) else upload(array, device)


class Mark:
    """Marks the work that a device was given so far, including copies that the host hasn't waited for."""

    def __init__(self, device: torch.device) -> None:
        self._event = _module(device).Event() if pins(device) else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has done that work."""
        if self._event is not None:
            self._event.synchronize()


class Download:
    """Copies a device's tensor into a host's buffer while the host goes on; :meth:`wait` returns the buffer.

    The buffer must not be used until then.
    """

    def __init__(self, source: Tensor, buffer: Tensor) -> None:
        buffer.copy_(source, non_blocking=pins(source.device))
        self._buffer, self._told = buffer, Mark(source.device)

    def wait(self) -> Tensor:
        """Waits until the copy is there."""
        self._told.wait()
        return self._buffer


def read_at_once(*tensors: Tensor) -> list[np.ndarray]:
    """Reads a device's tensors in one copy, as arrays of their shapes and dtypes."""
    packed = torch.cat([x.contiguous().flatten().view(torch.uint8) for x in tensors]).cpu()
    sizes = [x.numel() * x.element_size() for x in tensors]
    parts = zip(packed.split(sizes), tensors, strict=True)
    return [part.clone().view(x.dtype).view(x.shape).numpy() for part, x in parts]


# --- graphs -----------------------------------------------------------------------------------------------------------


class CaptureError(RuntimeError):
    """Raised if work can't be captured as a graph, though it can be launched."""


def capture(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Captures what ``work()`` launches as one graph; returns a function that replays it.

    ``work`` is called :data:`WARM_UP` times first, on a stream of its own, as PyTorch's notes on CUDA graphs say. It
    must read and write the same memory at every call, and never wait for the device.

    Raises:
        CaptureError: if something in it can't be captured; what was launched before may have been done.
    """
    module = _module(device)
    current, stream = module.current_stream(device), module.Stream(device)
    stream.wait_stream(current)
    try:
        with module.stream(stream):
            for _ in range(WARM_UP):
                work()
    finally:
        current.wait_stream(stream)
    graph = next(getattr(module, name) for name in GRAPHS if hasattr(module, name))()
    try:
        with module.stream(current), module.graph(graph):  # a failed capture would leave its stream set
            token = independently.set(partial(_in_branches, device))
            try:
                work()
            finally:
                independently.reset(token)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):  # raised by an environment
            raise
        raise CaptureError(str(error).partition("\n")[0] or type(error).__name__) from error
    return graph.replay


@lru_cache
def _branches(device: torch.device) -> list[Any]:
    """Returns the streams of a device's branches: always the same, because libraries keep memory for each stream."""
    return [_module(device).Stream(device) for _ in range(BRANCHES)]


def _in_branches(device: torch.device, calls: Calls) -> list[Any]:
    """Calls functions while a graph is captured, in branches that begin and end together.

    The bits are those of a branch alone, because its kernels are the same, and so is the memory that libraries keep for
    its stream. What a branch allocates lies in memory that no other branch gets.
    """
    if len(calls) == 1:
        return one_by_one(calls)
    module, results = _module(device), []
    current, streams = module.current_stream(device), _branches(device)[: len(calls)]
    for stream in streams:
        stream.wait_stream(current)
    try:
        for number, call in enumerate(calls):
            with module.stream(streams[number % len(streams)]):
                results.append(call())
    finally:  # open branches would fail the capture, and hide what has failed
        for stream in streams:
            current.wait_stream(stream)
    return results


# --- scripts of users -------------------------------------------------------------------------------------------------


def has_one_each(processes: int) -> bool:
    """Returns whether PyTorch's current kind of accelerator has a device for each of a host's processes."""
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= processes


def take_own(local_rank: int) -> torch.device:
    """Makes the ``local_rank``-th device of PyTorch's kind of accelerator this process's own, and returns it."""
    torch.accelerator.set_device_index(local_rank)
    return current_accelerator()


def current_accelerator() -> torch.device:
    """Returns this process's accelerator, with its index."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def is_capturing() -> bool:
    """Returns whether a script captures a CUDA graph at the moment: nothing can be read from the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
