"""This machine's devices: what is asked of them before a run starts, and how a rank sets up its own."""

from __future__ import annotations

import atexit
import os
import platform
import sys
from contextlib import ExitStack

import gymnasium
import numpy as np
import torch

from lockstep.config.checks import ungraphed
from lockstep.config.run import Config
from lockstep.core.machine import (
    TORCH_PACKAGES,
    device_facts,
    fix_mkl_mode,
    kernel_variables,
    one_blas_thread,
    openblas_kernel,
    package_versions,
    processor,
    processor_key,
)
from lockstep.core.private import user_cache
from lockstep.core.rank_variables import apply, machine_class, settings_of
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import Topology
from lockstep.torch_engine.setup import accelerator


def check_device(device: str, nproc: int) -> None:
    """Raises a one-line ``ValueError`` unless this machine has the devices that ``nproc`` ranks need."""
    if device != "cpu":
        accelerator.check_accelerator(device, nproc)


def chosen_device() -> str:
    """Chooses what ``device: auto`` means on this machine: ``cuda``, ``xpu`` or ``cpu``."""
    return accelerator.chosen_device()


def count_accelerators(device: str) -> int:
    """Counts the accelerators of a kind that PyTorch sees."""
    return accelerator.count_devices(device)


def device_memory(device: str) -> int:
    """Returns the bytes of the smallest visible accelerator of a kind."""
    return accelerator.memory_of(device)


def name_ranks(config: Config, ranks: int, processes: int) -> tuple[str, list[str]]:
    """Describes the processes of a run, all together and each by name; ``processes`` is for the JAX engine.

    Raises:
        ValueError: if this machine has too few GPUs; the message is one line.
    """
    check_device(config.device, ranks)
    threads = f"{config.threads} thread{'s' if config.threads > 1 else ''}"
    names = [f"rank {rank}, {name}" for rank, name in enumerate(accelerator.names_of_ranks(config.device, ranks))]
    return f"{ranks} process{'es' if ranks > 1 else ''} of {threads}", names


def uses_graphs(config: Config) -> bool:
    """Returns whether steps that a rank takes alone are captured as graphs; by default if they can be, on CUDA."""
    if config.cuda_graphs is not None:
        return config.cuda_graphs
    return config.device == "cuda" and ungraphed(config) is None


COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def set_up_torch(config: Config, topology: Topology) -> torch.device:
    """Fixes what decides the last bits (threads, TF32, autotuning) and gives this rank its device."""
    fix_mkl_mode()
    one_blas_thread()  # for NumPy; PyTorch has its own BLAS, or the number set now
    torch.set_num_threads(config.threads)
    if config.compile and COMPILER_CACHE not in os.environ:
        os.environ[COMPILER_CACHE] = _compiler_cache()
    return set_up_device(config, topology)


def set_up_device(config: Config, topology: Topology) -> torch.device:
    """Gives a process its device, with kernels and libraries that repeat their bits there, as for a rank."""
    accelerator.pin_down_kernels(config.device != "cpu", warn_only=config.reduction == "fast")
    if config.device == "cpu":
        return torch.device("cpu")
    apply(settings_of(config.device, topology, machine_class(topology)))
    return accelerator.take_device(config.device, topology.local_rank)


def _compiler_cache() -> str:
    """Makes the directory of compiled kernels in the user's cache, one for each kind of processor.

    PyTorch's own is in ``/tmp``, where others could have made it. Its keys don't include the width of vectors for which
    a kernel was written, and another processor computes wrong numbers with it.
    """
    directory, usable = user_cache(f"inductor/{processor_key(torch.backends.cpu.get_cpu_capability())}")
    return str(directory) if usable else _own_directory()


def _own_directory() -> str:
    """Makes a directory for this process alone, which is removed when the process ends."""
    directory = ExitStack()
    atexit.register(directory.close)
    return str(directory.enter_context(temporary_directory()))


def machine_facts(device: torch.device) -> dict[str, str]:
    """Returns what must be the same on every rank for the same bits: instruction set, versions, device."""
    return {
        "machine": platform.machine(),
        "cpu": processor(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "kernel variables": kernel_variables(),
        "openblas kernel": openblas_kernel(),
        "device": accelerator.name_of(device),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
        "packages of environments": package_versions(),
        "mujoco": str(getattr(sys.modules.get("mujoco"), "__version__", "not loaded")),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **device_facts(device.type, accelerator.platform_version(device), TORCH_PACKAGES),
    }
