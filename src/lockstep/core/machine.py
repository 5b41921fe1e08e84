"""The machine's processor, which decides the last bits of a result, and how this process uses its memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import RankMismatchError

CPUINFO, STATUS = Path("/proc/cpuinfo"), Path("/proc/self/status")
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What tells apart hosts of one name."""
NUMBERS = {
    "family": ("cpu family", "CPU implementer"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
"""What tells processors of one name apart, and the kernel's keys."""
INSTRUCTION_SETS = ("avx512f", "avx2", "avx", "sve", "asimd")

MMAP_THRESHOLD, TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -3, -1, -4, -8  # of mallopt(3)
MOST_FROM_HEAP = 32 << 20
"""Bytes of the largest array that comes from the heap; glibc takes no more."""
MOST_KEPT = 512 << 20
"""Bytes that may lie free at the heap's end before they go back to the system."""
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""By which a user has chosen already."""
HEAP_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX")
"""By which a user has chosen how many heaps there are, and what lies in them."""


KERNEL_VARIABLES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY"),
    *("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT", "PYTORCH_TUNABLEOP_ENABLED"),
    *("PYTORCH_TUNABLEOP_TUNING", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM"),
    *("TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"),
    *("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"),
    *("LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_NVLS_ENABLE"),
)
"""By which libraries choose how they compute, and so the last bits."""

CUDA_PACKAGES = ("nvidia_cu", "nvidia_nccl", "nvidia_nvjitlink", "nvidia_nvshmem")
TORCH_PACKAGES = (*CUDA_PACKAGES, "triton", "pytorch_triton", "onemkl_sycl", "oneccl", "dpcpp_cpp_rt", "intel_sycl_rt")
JAX_PACKAGES = (*CUDA_PACKAGES, "jax_cuda", "jax_rocm", "libtpu")
"""What the names of packages begin with by which a framework computes on accelerators."""

ENVIRONMENT_PACKAGES = (
    *("ale_py", "box2d", "box2d_py", "brax", "envpool", "equinox", "gymnax", "minigrid", "mujoco", "mujoco_mjx"),
    *("playground", "scipy"),
)
"""Packages that environments and networks of users compute with, as the folders of their versions are called."""

SELDOM = (50_000, 20, 100)
"""Thresholds of Python's collector by which starting engine jax takes about a tenth less."""
USUAL = gc.get_threshold()


def system_fact(file: Path, *keys: str) -> str:
    """The first value of one of the keys in a file of the kernel's (``key: value`` a line); empty where it isn't."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    return system_fact(CPUINFO, "model name") or platform.processor()


def processor() -> str:
    """The processor's name with its numbers, where the system tells them: a virtual machine gives many one name."""
    numbers = {name: system_fact(CPUINFO, *keys) for name, keys in NUMBERS.items()}
    said = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
    return f"{cpu_model()} ({said})" if said else cpu_model()


def cpu_features() -> tuple[str, ...]:
    """The processor's features by the kernel's names, sorted; empty where the system doesn't tell them."""
    return tuple(sorted(system_fact(CPUINFO, "flags", "Features").split()))


def instruction_set() -> str:
    """The widest vector instructions that the processor has, such as ``avx2``; the architecture where none is known."""
    features = cpu_features()
    return next((name for name in INSTRUCTION_SETS if name in features), platform.machine())


def peak_resident() -> float:
    """The largest resident set that this process has had so far, in MiB; its children apart."""
    kilobytes = system_fact(STATUS, "VmHWM")  # getrusage would count what the launcher held when it forked this process
    if kilobytes:
        return int(kilobytes.split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The first rank that says something else than rank 0, and of what; None if all say the same."""
    pairs = ((rank, key) for rank in range(len(everyone)) for key in everyone[0])
    return next(((rank, key) for rank, key in pairs if everyone[rank][key] != everyone[0][key]), None)


def check_facts_alike(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise a ``RankMismatchError`` if what ranks say of their machine, versions and config, in rank order, differs."""
    found = first_difference(everyone)
    if found is not None:
        rank, key = found
        raise RankMismatchError(
            f"rank {rank} differs from rank 0 in {key}: {everyone[rank][key]} against {everyone[0][key]}; "
            "the same agent needs the same kind of machine, versions and config on every rank"
        )


def keep_freed_memory(one_heap: bool = False) -> bool:
    """Tells glibc's ``malloc`` to keep what is freed; returns whether it does.

    An iteration makes the same arrays as the one before. By default those above 128 KiB are mapped anew, and the heap's
    end goes back to the system, so that each is filled with zeros again, page by page, as it is written: a tenth of the
    time of some runs. With ``one_heap`` this holds for arrays of any size and of every thread: XLA takes all that a
    program needs at a time, in whichever thread begins it. Other libraries' allocators, and a user's own choice by
    glibc's variables, stay as they are.
    """
    if sys.platform != "linux" or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # no glibc
        return False
    wanted = [(MMAP_THRESHOLD, MOST_FROM_HEAP), (TRIM_THRESHOLD, MOST_KEPT)]
    if one_heap and not any(name in os.environ for name in HEAP_VARIABLES):
        wanted += [(MMAP_MAX, 0), (ARENA_MAX, 1)]
    return all([bool(mallopt(*option)) for option in wanted])


def collect_seldom() -> None:
    """Has Python look for cycles seldom, until :func:`collect_as_usual`: while a program is traced, few are garbage."""
    gc.set_threshold(*SELDOM)


def collect_as_usual() -> None:
    """Takes back :func:`collect_seldom`, and has what is there by now left out; does nothing where it wasn't called."""
    if gc.get_threshold() == SELDOM:
        gc.freeze()
        gc.set_threshold(*USUAL)


def kernel_variables(more: Sequence[str] = ()) -> str:
    """The :data:`KERNEL_VARIABLES`, and ``more``, that are set, ``NAME=value`` with blanks between them."""
    names = sorted({*KERNEL_VARIABLES, *more})
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def device_facts(device: str, driver: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Gives the versions of what computes on a ``device`` besides its framework; nothing of a CPU.

    cuBLAS, cuDNN and NCCL, XLA's plugin and TPUs' compiler are packages that are upgraded by themselves. ``driver`` is
    what the framework says of the platform, ``packages`` what names of those by which it computes begin with.
    """
    if device == "cpu":
        return {}
    return {"platform version": driver, "packages of devices": package_versions(packages)}


@functools.cache
def package_versions(beginnings: tuple[str, ...] | None = None) -> str:
    """The :data:`ENVIRONMENT_PACKAGES` that are installed, ``name version`` with commas between them.

    With ``beginnings`` those whose names begin so, in small letters and with ``_`` where a name has ``-``.
    Read from names of folders, ``name-version.dist-info``: ``importlib.metadata`` would read and parse their files.
    """
    found: dict[str, str] = {}
    for path in sys.path:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(path or ".")):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                name = name.lower()
                wanted = name.startswith(beginnings) if beginnings is not None else name in ENVIRONMENT_PACKAGES
                if wanted and entry.endswith(".dist-info"):
                    found.setdefault(name, version)
    return ", ".join(f"{name} {found[name]}" for name in sorted(found))


def one_blas_thread() -> None:
    """Lets NumPy, SciPy, and what else has a BLAS and is loaded, compute with one thread, whatever cores there are.

    The last bits of what an environment has them compute depend on it, and environments are stepped here, in ranks that
    others start and in worker processes. SciPy's wheels have a BLAS of their own. It is loaded here, so that it has one
    thread already where an environment imports SciPy later, even in a step.
    """
    from threadpoolctl import threadpool_limits

    _load_scipys_blas()
    threadpool_limits(1, "blas")


def _load_scipys_blas() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("scipy")
        package = None if spec is None or spec.origin is None else Path(spec.origin).parent
        for folder in () if package is None else (package.parent / "scipy.libs", package / ".dylibs"):
            for library in folder.glob("*openblas*"):
                ctypes.CDLL(str(library))


def steady_products() -> None:
    """Asks MKL for products whose last bits don't depend on where factors begin in memory, unless a user chose a mode.

    It is read at MKL's first product in a process, so commands ask before anything else, and so do ranks. Processes
    of a user's own keep what they have: other modes have other last bits.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")


def one_torch_thread() -> None:
    """Lets PyTorch compute with one thread, if an environment has loaded it in a process of another engine."""
    torch_threads(1)


def torch_threads(count: int) -> None:
    """Lets PyTorch compute with so many threads in this process from here on, if it is loaded."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
