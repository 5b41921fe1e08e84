"""Counts this machine's accelerators in a process of its own, because starting JAX to count them takes their memory.

JAX also refuses to join processes once it has started, and joining them requires knowing which GPUs each will hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax

from lockstep.core.machine import peak_resident
from lockstep.core.topology import without_launcher
from lockstep.jax_engine.setup import set_up

_VISIBLE = "jax_cuda_visible_devices"
_told: str | None = None
"""Value of that setting before this process's own GPUs were set; None if they weren't."""


@dataclass(frozen=True)
class Accelerators:
    """Accelerators of one kind, by JAX's name, and the bytes usable on the smallest (0: JAX doesn't say)."""

    count: int
    kind: str
    memory: int


def in_this_process() -> Accelerators:
    """Counts the devices that this process holds; starts JAX."""
    devices = jax.local_devices()
    memory = min(int((d.memory_stats() or {}).get("bytes_limit", 0)) for d in devices)
    return Accelerators(len(devices), devices[0].device_kind, memory)


@functools.cache
def on_this_machine(device: str) -> Accelerators:
    """Counts the accelerators (``cuda`` or ``tpu``) that this machine's processes can share, without starting JAX here.

    Raises:
        ValueError: if there is none; the message is one line.
    """
    environment = without_launcher() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-P", "-m", "lockstep.jax_engine.setup.accelerators", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"device: {device}: JAX can't look for devices here ({said})")
    found = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise ValueError(found["error"])
    return Accelerators(**found)


def gpus_of_this_host() -> list[int]:
    """Returns the numbers of the GPUs that this host's processes can divide between them, without starting JAX.

    It asks CUDA's driver in this process. Asking in another process, as :func:`on_this_machine` does, takes a piece of
    each GPU's memory, and all processes of a launcher would do it at once.

    Raises:
        ValueError: if there is none; the message is one line.
    """
    told = jax.config.values[_VISIBLE] if _told is None else _told
    if told != "all":
        return [int(number) for number in told.split(",")]
    return list(range(_gpus_of_driver() or on_this_machine("cuda").count))


def take_gpus(numbers: Sequence[int]) -> None:
    """Makes JAX hold these GPUs when it starts; :func:`gpus_of_this_host` returns the same afterwards as before."""
    global _told
    _told = _told or jax.config.values[_VISIBLE]
    jax.config.update(_VISIBLE, ",".join(map(str, numbers)))


def _gpus_of_driver() -> int:
    """Counts the GPUs that CUDA's driver shows this process, without a context on any; 0 without a driver."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def chosen_device() -> str:
    """Returns what ``device: auto`` means on this machine: ``cuda``, ``tpu`` or ``cpu``; doesn't start JAX here."""
    for device in ("cuda", "tpu"):
        with contextlib.suppress(ValueError):
            if on_this_machine(device).count:
                return device
    return "cpu"


def peak_memory() -> dict[str, list[float]]:
    """Returns the peak MiB so far, of the host (without worker processes) and of this process's accelerators."""
    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    most = max((int(each.get("peak_bytes_in_use", 0)) for each in stats), default=0)
    return {"peak_memory_mb": [peak_resident()], "peak_gpu_memory_mb": [most / 2**20]}


def _main(device: str) -> dict[str, object]:
    try:
        set_up.configure(1, device, None)
        set_up.check_device(device)
    except ValueError as error:
        return {"error": str(error)}
    return asdict(in_this_process())


if __name__ == "__main__":
    report = json.dumps(_main(sys.argv[1]))
    print(report, flush=True)
    os._exit(0)  # closing a back end takes long
