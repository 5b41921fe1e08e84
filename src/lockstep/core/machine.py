"""Facts of the machine that decide the last bits of a result, and this process's use of memory and threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import RankMismatchError

CPUINFO, STATUS = Path("/proc/cpuinfo"), Path("/proc/self/status")
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Tells apart hosts that have the same name."""
NUMBERS = {
    "family": ("cpu family", "CPU implementer"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
"""Numbers that tell apart processors of the same name, with the kernel's keys for them."""
INSTRUCTION_SETS = ("avx512f", "avx2", "avx", "sve", "asimd")

MMAP_THRESHOLD, TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -3, -1, -4, -8  # of mallopt(3)
MOST_FROM_HEAP = 32 << 20
"""Largest array that comes from the heap, in bytes; glibc allows no more."""
MOST_KEPT = 512 << 20
"""Free bytes at the heap's end that are kept before they go back to the system."""
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables by which a user may have configured malloc already."""
HEAP_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX")
"""Variables by which a user may have chosen the number of heaps and what lies in them."""


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
"""Variables that change how libraries compute, and so the last bits."""

HASH_SEED = "PYTHONHASHSEED"
"""Variable from which Python hashes texts and bytes, and so the order of a set of them; it is read at a start only."""

BEGUN_AGAIN = "LOCKSTEP_BEGUN_AGAIN"
"""Variable by which a process that has begun again knows it."""

CUDA_PACKAGES = ("nvidia_cu", "nvidia_nccl", "nvidia_nvjitlink", "nvidia_nvshmem")
TORCH_PACKAGES = (*CUDA_PACKAGES, "triton", "pytorch_triton", "onemkl_sycl", "oneccl", "dpcpp_cpp_rt", "intel_sycl_rt")
JAX_PACKAGES = (*CUDA_PACKAGES, "jax_cuda", "jax_rocm", "libtpu")
"""Prefixes of the packages by which a framework computes on accelerators."""

ENVIRONMENT_PACKAGES = (
    *("ale_py", "box2d", "box2d_py", "brax", "envpool", "equinox", "gymnax", "minigrid", "mujoco", "mujoco_mjx"),
    *("playground", "scipy"),
)
"""Packages that users' environments and networks compute with, named as in ``name-version.dist-info``."""

MACHINE_FACTS = (
    *("machine", "cpu", "cpu capability", "device", "platform", "platform version", "packages of devices"),
    *("torch", "jax", "jaxlib", "xla flags", "numpy", "gymnasium", "mujoco", "python", "lockstep"),
    *("kernel variables", "openblas kernel", "packages of environments"),
)
"""Names of all facts of hardware and software that bits may depend on, of both engines; not every run has each."""

SELDOM = (50_000, 20, 100)
"""Thresholds of Python's garbage collector that shorten the start of the JAX engine."""
USUAL = gc.get_threshold()


def system_fact(file: Path, *keys: str) -> str:
    """Returns the first value of one of the keys in a kernel file of ``key: value`` lines; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


def cpu_model() -> str:
    """Returns the processor's name, if the system tells it."""
    return system_fact(CPUINFO, "model name") or platform.processor()


def processor() -> str:
    """Returns the processor's name with its numbers, if known: virtual machines give many processors one name."""
    numbers = {name: system_fact(CPUINFO, *keys) for name, keys in NUMBERS.items()}
    said = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
    return f"{cpu_model()} ({said})" if said else cpu_model()


def cpu_features() -> tuple[str, ...]:
    """Returns the processor's features by the kernel's names, sorted; empty if the system doesn't tell them."""
    return tuple(sorted(system_fact(CPUINFO, "flags", "Features").split()))


def processor_key(*more: str) -> str:
    """Returns a name for compiled code that runs on this kind of processor only: architecture and a hash of features.

    ``more`` are other words that the code depends on.
    """
    features = " ".join((*cpu_features(), *more))
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def instruction_set() -> str:
    """Returns the widest vector instructions of the processor, such as ``avx2``, else the architecture."""
    features = cpu_features()
    return next((name for name in INSTRUCTION_SETS if name in features), platform.machine())


def openblas_kernel() -> str:
    """Returns which kernels NumPy's own OpenBLAS multiplies with, such as ``SkylakeX``; "" if it has another BLAS.

    They follow from the processor, or from the variable ``OPENBLAS_CORETYPE``.
    """
    import numpy as np

    for file in Path(np.__file__).parent.with_name("numpy.libs").glob("*openblas*"):
        with contextlib.suppress(AttributeError, OSError):
            name = ctypes.CDLL(str(file)).scipy_openblas_get_corename64_
            name.restype = ctypes.c_char_p
            return name().decode()
    return ""


def peak_resident() -> float:
    """Returns the largest resident set that this process has had so far, in MiB, without its children."""
    kilobytes = system_fact(STATUS, "VmHWM")  # getrusage would count what the launcher held when it forked this process
    if kilobytes:
        return int(kilobytes.split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """Returns the first rank whose facts differ from those of rank 0, and the key; None if all are equal.

    A rank of another version may lack a key, or have one that rank 0 lacks.
    """
    pairs = ((rank, key) for rank in range(len(everyone)) for key in {**everyone[0], **everyone[rank]})
    return next(((rank, key) for rank, key in pairs if everyone[rank].get(key) != everyone[0].get(key)), None)


def check_facts_alike(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raises a ``RankMismatchError`` if ranks, in rank order, report different machines, versions or configs."""
    found = first_difference(everyone)
    if found is not None:
        rank, key = found
        raise RankMismatchError(
            f"rank {rank} differs from rank 0 in {key}: {everyone[rank].get(key)} against {everyone[0].get(key)}; "
            "the same agent needs the same kind of machine, versions and config on every rank"
        )


def keep_freed_memory(one_heap: bool = False) -> bool:
    """Tells glibc's ``malloc`` to keep freed memory; returns whether it does.

    Every iteration makes the same arrays as the one before. By default, glibc maps arrays above 128 KiB anew and
    returns the heap's end to the system, so the kernel zeroes the same pages again and again. ``one_heap`` extends this
    to arrays of any size and to every thread, because XLA allocates a program's memory at once, in whichever thread
    starts it. Other allocators, and choices that a user made by glibc's variables, stay as they are.
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


def slow_down_gc() -> None:
    """Makes Python's garbage collector run rarely, until :func:`restore_gc`: tracing makes little garbage."""
    gc.set_threshold(*SELDOM)


def restore_gc() -> None:
    """Undoes :func:`slow_down_gc` and freezes the objects that exist by now; does nothing if it wasn't called."""
    if gc.get_threshold() == SELDOM:
        gc.freeze()
        gc.set_threshold(*USUAL)


def kernel_variables(more: Sequence[str] = ()) -> str:
    """Returns those of :data:`KERNEL_VARIABLES` and ``more`` that are set, as ``NAME=value`` separated by spaces.

    Also returns the seed of Python's hashes, unless it is ours.
    """
    names = sorted({*KERNEL_VARIABLES, *more, HASH_SEED})
    values = {name: os.environ[name] for name in names if name in os.environ}
    return " ".join(f"{name}={value}" for name, value in values.items() if (name, value) != (HASH_SEED, "0"))


def device_facts(device: str, driver: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of what a ``device`` computes with besides its framework; empty for a CPU.

    cuBLAS, cuDNN, NCCL, XLA's plugins and the TPU compiler are packages that are upgraded independently. ``driver`` is
    the platform version that the framework reports, ``packages`` are prefixes of the packages that it computes with.
    """
    if device == "cpu":
        return {}
    return {"platform version": driver, "packages of devices": package_versions(packages)}


@functools.cache
def package_versions(beginnings: tuple[str, ...] | None = None) -> str:
    """Returns the installed ones of :data:`ENVIRONMENT_PACKAGES`, as ``name version`` separated by commas.

    With ``beginnings``: the packages whose names, in lower case and with ``_`` for ``-``, begin so. They are read from
    folder names, ``name-version.dist-info``, because ``importlib.metadata`` would read and parse the files.
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
    """Makes NumPy, SciPy and every other BLAS that is loaded compute with one thread, whatever the number of cores.

    The last bits of what environments compute depend on the number of threads, in ranks and in worker processes alike.
    SciPy's wheels have their own BLAS. It is loaded here, so that it has one thread even if an environment imports
    SciPy later, in a step.
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


def fix_mkl_mode() -> None:
    """Makes MKL's products independent of the alignment of their operands, unless the user chose a mode.

    MKL reads the variable at its first product in a process, so commands and ranks set it before anything else. A
    user's own processes keep their mode, because another mode gives other last bits.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")


def fix_hashes(variables: MutableMapping[str, str]) -> bool:
    """Sets Python's hash seed to 0 in the variables of a process to be started, unless the user chose one.

    Returns whether it has changed them. Python draws a seed for each process that it isn't given one for. Environments
    that go through a set of texts, or draw by ``hash``, would then differ from rank to rank and from start to start.
    """
    if variables.get(HASH_SEED, "") not in ("", "random"):
        return False
    variables[HASH_SEED] = "0"
    return True


def begin_with_fixed_hashes() -> None:
    """Starts this process's program again, in the same process, if its hashes aren't fixed; returns if they are.

    For the first call of a program only: what it has done until then is done twice. A process keeps its hashes under a
    debugger, which would lose it, and with Python's options ``-E`` and ``-I``, which hide the variable from it.
    """
    again = os.environ.pop(BEGUN_AGAIN, None) is not None  # by a wrapper of Python's that takes the variable away
    keeps = again or sys.flags.ignore_environment or sys.gettrace() is not None or "pydevd" in sys.modules
    if fix_hashes(os.environ) and not keeps and sys.executable:
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, BEGUN_AGAIN: "1"})


def one_torch_thread() -> None:
    """Makes PyTorch compute with one thread, if an environment has loaded it in a process of another engine."""
    torch_threads(1)


def torch_threads(count: int) -> None:
    """Makes PyTorch compute with ``count`` threads in this process from now on, if it is loaded."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
