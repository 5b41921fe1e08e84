"""Setting JAX up before it looks at a device: platform, CPU devices, what decides the last bits, compilation cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform as machine
import re
import sys
from pathlib import Path

import jax
import jaxlib.version
import numpy as np

from lockstep.core.life import life
from lockstep.core.machine import (
    JAX_PACKAGES,
    cpu_features,
    device_facts,
    instruction_set,
    kernel_variables,
    one_blas_thread,
    package_versions,
    processor,
)
from lockstep.core.private import user_cache
from lockstep.core.shards import MAX_DEFAULT_SHARDS

PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}

# XLA's CPU client runs all devices of a process on one pool of threads, as many as the machine has cores or the
# process has devices, whichever is more, unless this says a number. Where many operations of a device are ready at
# once, half of them are handed to another thread of the pool, which has to be woken and then takes the core of another
# device, so that more than one thread a device slows small minibatches down. But a
# device that waits in a collective holds a thread, and if it waits in two at once, the device that is waited for may
# find none to work on.
POOL_VARIABLE = "PJRT_NPROC"
LEAN_THREADS, LEAST_THREADS, THREADS_PER_DEVICE = 2, 4, 2
MOST_DEVICES = 64

ONE_THREAD_FLAGS = {"xla_cpu_multi_thread_eigen": "false"}
GPU_FLAGS = {"xla_gpu_deterministic_ops": "true", "xla_gpu_autotune_level": "0"}
FIRST_MEETING = {"xla_gpu_first_collective_call_terminate_timeout_seconds": "600"}
"""XLA ends a process 40 seconds after one of its GPUs has come to a program's first collective, if another has not: one
with more shards takes longer for its rollout. A version that doesn't know the flag would end it at once."""

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MIN_COMPILE_SECONDS = 0.2


def lean_pool(devices: int) -> int:
    """Threads of the pool for programs whose collectives follow one another: one for each CPU device of the process.

    Two at least: XLA compiles large loops in parts where the pool has more than one thread, and the last bits of a
    product and a sum depend on that, though not on the number of parts. So one device has the bits of many.
    """
    return max(LEAN_THREADS, devices)


def roomy_pool(devices: int) -> int:
    """Threads of the pool for any other program.

    Bits may depend on it in what a user brings, and in convolutions that aren't :func:`ynnpacks_convolutions`: there it
    is made for :func:`pool_devices`.
    """
    return max(LEAST_THREADS, THREADS_PER_DEVICE * devices)


def ynnpacks_convolutions() -> bool:
    """Says whether XLA's CPU compiler gives float32 convolutions to YNNPACK, whose bits no pool decides.

    That is known of these versions, on x86, unless the user's ``XLA_FLAGS`` say otherwise.
    """
    known = jaxlib.version.__version__.startswith("0.10.") and machine.machine() in ("x86_64", "AMD64")
    return known and "ynn" not in os.environ.get("XLA_FLAGS", "")


def check_pool(wanted: int, what: str) -> None:
    """Raises a one-line ``ValueError`` if JAX has started in this process with a smaller pool than ``what`` needs."""
    present = int(os.environ.get(POOL_VARIABLE) or wanted)
    if present < wanted:
        raise ValueError(
            f"{what}: needs a pool of {wanted} threads, but JAX has started with {present} in this process; "
            "start a fresh process"
        )


def pool_devices(shards: int | None) -> int:
    """Says for how many devices the pool is made where bits depend on its size: as many as there may be shards."""
    return max(MAX_DEFAULT_SHARDS, shards or 1)


def add_xla_flags(flags: dict[str, str]) -> None:
    """Appends flags to ``XLA_FLAGS``; what the user set stays as it is."""
    present = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.lstrip("-").partition("=")[0] for flag in present}
    added = [f"--{name}={value}" for name, value in flags.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join(present + added)


def gpu_flags() -> dict[str, str]:
    """Gives the flags of XLA's for GPUs, as far as this version is known to have them."""
    return GPU_FLAGS | (FIRST_MEETING if jaxlib.version.__version__.startswith("0.10.") else {})


NUMBERS = {
    "jax_enable_x64": False,
    "jax_explicit_x64_dtypes": "warn",
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_softmax_custom_jvp": False,
    "eager_constant_folding": False,
    "jax_disable_jit": False,
    "jax_use_shardy_partitioner": True,
    "jax_numpy_rank_promotion": "allow",
    "jax_numpy_dtype_promotion": "standard",
}
"""Settings of JAX's that decide an agent's numbers, or refuse ours, which a user's own variables might have set
otherwise."""
NEEDED = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "eager_constant_folding"),
    *("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"),
)
"""Those without which ``lockstep.jax`` fails, or trains another agent."""
ONLY_WARNS = {"jax_numpy_rank_promotion": "warn"}
PRECISION = "jax_default_matmul_precision"
PRECISIONS = {"cuda": "highest", "tpu": "highest"}
"""The same of products of matrices, by platform: no TF32, no bfloat16. On CPUs JAX chooses."""
JAX_VARIABLES = (
    *("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_OPTIMIZATION_LEVEL", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT"),
    *("JAX_MEMORY_FITTING_LEVEL", "JAX_MEMORY_FITTING_EFFORT", "JAX_COMPILER_ENABLE_REMAT_PASS"),
    *("JAX_ENABLE_PGLE", "JAX_PGLE_PROFILING_RUNS", "JAX_COMPILATION_CACHE_EXPECT_PGLE"),
    *("JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS", "JAX_EMBEDDED_CONSTANTS_MAX_BYTES", "JAX_SCAN3", "JAX_REMAT3"),
    *("JAX_CUSTOM_VJP3", "JAX_USE_DIRECT_LINEARIZE", "JAX_ENABLE_CUSTOM_PRNG", "JAX_THREEFRY_GPU_KERNEL_LOWERING"),
    *("JAX_BCOO_CUSPARSE_LOWERING", "JAX_RAGGED_DOT_USE_RAGGED_DOT_INSTRUCTION"),
    "JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING",
    *("JAX_PALLAS_USE_MOSAIC_GPU", "JAX_USE_MAGMA", "JAX_DEFAULT_DEVICE", "JAX_PJRT_CLIENT_CREATE_OPTIONS"),
)
"""By which JAX compiles otherwise: they are the user's, as ``XLA_FLAGS`` is, and the same in every process."""


def settle_numbers(platform: str) -> None:
    """Gives JAX the :data:`NUMBERS` and the platform's precision; a version without a setting goes without it."""
    for name, value in {**NUMBERS, PRECISION: PRECISIONS.get(platform)}.items():
        if name in jax.config.values:
            jax.config.update(name, value)


def check_numbers() -> None:
    """Refuses what a user's own process has set otherwise of the :data:`NEEDED`, which is the user's to set there.

    Raises:
        ValueError: one line with the first of them.
    """
    for name in NEEDED:
        value = getattr(jax.config, name, NUMBERS[name])  # as a context manager has it here, too
        if value not in (NUMBERS[name], ONLY_WARNS.get(name, NUMBERS[name])):
            raise ValueError(f"{name}: {value}; lockstep.jax needs {NUMBERS[name]}")


def configure(threads: int, platform: str, devices: int | None, pool: int | None = None) -> None:
    """Settles what counts only before JAX's first use of a device.

    ``devices`` are made of this process's CPU, one by default; ``pool`` are the threads that they share, by default
    those of the :func:`roomy_pool` of as many devices.

    Raises:
        ValueError: no such platform; CPU devices on another platform; JAX has started with other settings.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"device: {platform} is none of {', '.join(PLATFORMS)}")
    if devices is not None and platform != "cpu":
        raise ValueError(f"simulate_devices: {devices} devices can be simulated on device cpu, not on {platform}")
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"simulate_devices: {devices} must be 1 to {MOST_DEVICES}")
    if platform == "cpu":
        if not has_started():  # it is looked at once; what it says after that is what JAX has started with
            os.environ[POOL_VARIABLE] = str(pool or roomy_pool(devices or 1))
        add_xla_flags(ONE_THREAD_FLAGS if threads == 1 else {})
    elif platform == "cuda":
        add_xla_flags(gpu_flags())
    one_blas_thread()
    jax.config.update("jax_platforms", PLATFORMS[platform])
    settle_numbers(platform)
    if platform == "cpu":
        _set_cpu_devices(devices or 1)
    use_compilation_cache()
    _count_compilations()


@functools.cache
def _count_compilations() -> None:
    """Lets what JAX does on the way to a program count as progress: to trace, lower and compile it."""
    jax.monitoring.register_event_duration_secs_listener(lambda *_, **__: life.progressed())


def _set_cpu_devices(devices: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        present = jax.local_device_count()
        if present != devices:
            raise ValueError(
                f"simulate_devices: {devices}, but JAX has started with {present} in this process; "
                "set the number before JAX's first use, or start a fresh process"
            ) from None


def has_started() -> bool:
    """Says whether JAX has looked at its devices, after which settings of :func:`configure` come too late."""
    name = "jax_num_cpu_devices"
    given = jax.config.values[name]
    try:
        jax.config.update(name, 1 if given != 1 else 2)  # it can't be changed any more then
    except RuntimeError:
        return True
    jax.config.update(name, given)
    return False


def look_with_cpu() -> None:
    """Starts JAX with the CPU, in a process that looks at environments and trains nothing; what has started stays.

    No variable is set, for the processes that it starts would have it as well.
    """
    if not has_started():
        jax.config.update("jax_platforms", PLATFORMS["cpu"])
        settle_numbers("cpu")
        jax.devices()


def prepare_jax() -> bool:
    """Sets what :func:`configure` does for threads, last bits and compiled programs, for a user's own program.

    It counts only before JAX's first use of a device, and after the number of CPU devices was set. The pool of threads
    is of one size up to eight devices, for what bits may depend on it; compiled programs are kept between runs unless
    JAX was told otherwise.

    Returns:
        Whether it counts: JAX hasn't started yet, or had the same settings when it did.
    """
    use_compilation_cache()
    threads = roomy_pool(pool_devices(_wanted_cpu_devices()))
    if not has_started():
        os.environ[POOL_VARIABLE] = str(threads)
        add_xla_flags(ONE_THREAD_FLAGS | GPU_FLAGS)
        return True
    platform, present = jax.default_backend(), os.environ.get("XLA_FLAGS", "").split()
    flags = {"cpu": ONE_THREAD_FLAGS, "gpu": GPU_FLAGS}.get(platform, {})
    roomy = platform != "cpu" or int(os.environ.get(POOL_VARIABLE, 0)) >= threads
    return roomy and all(f"--{name}={value}" in present for name, value in flags.items())


def _wanted_cpu_devices() -> int:
    """Counts the CPU devices that JAX makes, by its own setting or XLA's flag."""
    flagged = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max([1, jax.config.values["jax_num_cpu_devices"], *map(int, flagged)])


def cache_directory() -> Path | None:
    """Makes the directory of compiled programs in the user's cache, apart by what the processor can execute.

    JAX doesn't ask how many threads a program was compiled for: those of one thread, which earlier versions left in
    another directory, have other bits.

    None where it can't be made, or others may write there, and so put a program there that this user would execute.
    """
    features = hashlib.sha256(" ".join(cpu_features()).encode()).hexdigest()[:8]
    directory, usable = user_cache(f"jax/{machine.machine()}-{features}-threads")
    return directory if usable else None


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where ``JAX_COMPILATION_CACHE_DIR`` says or in the user's cache."""
    if CACHE_VARIABLE not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        directory = cache_directory()
        if directory is None:
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def check_device(platform: str) -> None:
    """Starts JAX's back end; raises a one-line ``ValueError`` if this machine has none of that platform."""
    expected = "gpu" if platform == "cuda" else platform
    try:
        found = jax.default_backend()
        if found != expected:
            jax.devices(platform)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {platform}, but JAX {jax.__version__} finds none here ({reason})") from None
    if found != expected:
        raise ValueError(f"device: {platform}, but JAX has started on {found} in this process; start a fresh one")


def machine_facts() -> dict[str, str]:
    """Gives what must be the same in every process for the same bits: instruction set, versions, device."""
    import gymnasium

    return {
        "machine": machine.machine(),
        "cpu": processor(),
        "cpu capability": instruction_set(),
        "kernel variables": kernel_variables(JAX_VARIABLES),
        "device": ", ".join(sorted({device.device_kind for device in jax.local_devices()})),
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "xla flags": os.environ.get("XLA_FLAGS", ""),
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
        "packages of environments": package_versions(),
        "mujoco": str(getattr(sys.modules.get("mujoco"), "__version__", "not loaded")),
        "python": ".".join(machine.python_version_tuple()[:2]),
        **device_facts(jax.default_backend(), _platform_version(), JAX_PACKAGES),
    }


def _platform_version() -> str:
    return " ".join(jax.local_devices()[0].client.platform_version.split())
