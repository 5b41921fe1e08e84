"""Sets JAX up before it looks at a device: platform, CPU devices, what decides the last bits, compilation cache."""

from __future__ import annotations

import contextlib
import functools
import os
import platform as machine
import re
import sys

import jax
import jaxlib.version
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from lockstep.core.life import life
from lockstep.core.machine import (
    JAX_PACKAGES,
    device_facts,
    instruction_set,
    kernel_variables,
    one_blas_thread,
    openblas_kernel,
    package_versions,
    processor,
)
from lockstep.core.shards import MAX_DEFAULT_SHARDS
from lockstep.jax_engine.setup.kept_programs import cache_is_the_users, use_compilation_cache

PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}

# XLA's CPU client runs all devices of a process on one pool of threads. Unless this variable says otherwise, the pool
# has as many threads as the machine has cores or the process has devices, whichever is more. Where many operations of
# a device are ready at once, half of them go to another thread of the pool, which must be woken and then takes another
# device's core. So more than one thread per device slows small minibatches down. But a device that waits in a
# collective holds a thread, and if it waits in two at once, the device that it waits for may find no thread to run on.
POOL_VARIABLE = "PJRT_NPROC"
LEAN_THREADS, LEAST_THREADS, THREADS_PER_DEVICE = 2, 4, 2
MOST_DEVICES = 64

ONE_THREAD_FLAGS = {"xla_cpu_multi_thread_eigen": "false"}

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""XLA's options for what computes with networks and environments.

By default XLA keeps float32 where numbers are rounded to bfloat16 and used at once. Which ones are depends on what is
fused, and so on the number of devices.
"""

GPU_FLAGS = {"xla_gpu_deterministic_ops": "true", "xla_gpu_autotune_level": "0"}
FIRST_MEETING = {"xla_gpu_first_collective_call_terminate_timeout_seconds": "600"}
"""XLA ends a process if its GPUs come to a program's first collective more than 40 seconds apart, and a GPU with more
shards takes longer for its rollout. A version that doesn't know the flag would end the process at once."""


def lean_pool(devices: int) -> int:
    """Returns the threads of the pool for programs that run their collectives in order: one for each CPU device.

    It is at least two. If the pool has more than one thread, XLA compiles large loops in parts, and the last bits of a
    product and a sum depend on that, but not on the number of parts. So one device has the bits of many.
    """
    return max(LEAN_THREADS, devices)


def roomy_pool(devices: int) -> int:
    """Returns the threads of the pool for any other program.

    Bits may depend on it in a user's own code, and in convolutions that aren't :func:`ynnpacks_convolutions`. There its
    size is that for :func:`pool_devices`.
    """
    return max(LEAST_THREADS, THREADS_PER_DEVICE * devices)


def ynnpacks_convolutions() -> bool:
    """Returns whether XLA's CPU compiler gives float32 convolutions to YNNPACK, whose bits don't depend on the pool.

    This is known of these versions, on x86, unless the user's ``XLA_FLAGS`` say otherwise.
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
    """Returns for how many devices the pool is made if bits depend on its size: as many as there may be shards."""
    return max(MAX_DEFAULT_SHARDS, shards or 1)


def add_xla_flags(flags: dict[str, str]) -> None:
    """Appends flags to ``XLA_FLAGS``; those that the user has set stay as they are."""
    present = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.lstrip("-").partition("=")[0] for flag in present}
    added = [f"--{name}={value}" for name, value in flags.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join(present + added)


def gpu_flags() -> dict[str, str]:
    """Returns XLA's flags for GPUs, as far as this version is known to have them."""
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
    "jax_legacy_prng_key": "allow",
}
"""JAX's settings that decide an agent's numbers or make JAX refuse our code; a user's variables might set them
otherwise."""
NEEDED = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "eager_constant_folding"),
    *("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion", "jax_legacy_prng_key"),
)
"""Settings without which ``lockstep.jax`` fails, or trains another agent."""
ONLY_WARNS = {"jax_numpy_rank_promotion": "warn", "jax_legacy_prng_key": "warn"}
PRECISION = "jax_default_matmul_precision"
PRECISIONS = {"cuda": "highest", "tpu": "highest"}
"""Precision of matrix products by platform: no TF32, no bfloat16. On CPUs JAX chooses."""
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
"""Variables that change how JAX compiles: the user may set them, like ``XLA_FLAGS``, the same in every process."""


def settle_numbers(platform: str) -> None:
    """Sets the :data:`NUMBERS` and the platform's precision in JAX; skips settings that this version doesn't have."""
    for name, value in {**NUMBERS, PRECISION: PRECISIONS.get(platform)}.items():
        if name in jax.config.values:
            jax.config.update(name, value)


def check_numbers() -> None:
    """Refuses other values of the :data:`NEEDED` settings in a user's own process, where Lockstep doesn't change them.

    Raises:
        ValueError: if a setting differs; one line that names the first.
    """
    for name in NEEDED:
        value = getattr(jax.config, name, NUMBERS[name])  # includes what a context manager has set
        if value not in (NUMBERS[name], ONLY_WARNS.get(name, NUMBERS[name])):
            raise ValueError(f"{name}: {value}; lockstep.jax needs {NUMBERS[name]}")


def check_not_traced() -> None:
    """Raises a one-line ``ValueError`` if JAX traces the caller's function, where arrays have no numbers."""
    traced = isinstance(jnp.zeros(()), Tracer)
    with contextlib.suppress(ImportError):
        from jax._src.core import trace_state_clean  # under vmap and grad, an array of no argument isn't traced

        traced = traced or not trace_state_clean()
    if traced:
        raise ValueError(
            "train: called in a function that JAX traces (jit, vmap, scan, …), which has no numbers; call it outside, "
            "once for each seed"
        )


def configure(threads: int, platform: str, devices: int | None, pool: int | None = None) -> None:
    """Settles what counts only before JAX first uses a device.

    ``devices`` is the number of CPU devices in this process, one by default; if JAX has started already, it may have
    more. ``pool`` is the number of threads that they share, by default that of the :func:`roomy_pool` for them.

    Raises:
        ValueError: if there is no such platform, CPU devices are asked for on another platform, or JAX has started with
            fewer devices or other settings.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"device: {platform} is none of {', '.join(PLATFORMS)}")
    if devices is not None and platform != "cpu":
        raise ValueError(f"simulate_devices: {devices} devices can be simulated on device cpu, not on {platform}")
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"simulate_devices: {devices} must be 1 to {MOST_DEVICES}")
    if platform == "cpu":
        if not has_started():  # JAX reads it once; afterwards it must show what JAX started with
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
    """Counts JAX's tracing, lowering and compiling as progress."""
    jax.monitoring.register_event_duration_secs_listener(lambda *_, **__: life.progressed())


def _set_cpu_devices(devices: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        present = jax.local_device_count()
        if present < devices:  # of more, the first ones are used
            raise ValueError(
                f"simulate_devices: {devices}, but JAX has started with {present} in this process; "
                "set the number before JAX's first use, or start a fresh process"
            ) from None


def has_started() -> bool:
    """Returns whether JAX has looked at its devices, after which settings of :func:`configure` come too late."""
    name = "jax_num_cpu_devices"
    given = jax.config.values[name]
    try:
        jax.config.update(name, 1 if given != 1 else 2)  # fails once JAX has started
    except RuntimeError:
        return True
    jax.config.update(name, given)
    return False


def look_with_cpu() -> None:
    """Starts JAX on the CPU, in a process that looks at environments and trains nothing.

    Does nothing if it has started.

    It sets no environment variable, because processes that this one starts would inherit it.
    """
    if not has_started():
        jax.config.update("jax_platforms", PLATFORMS["cpu"])
        settle_numbers("cpu")
        jax.devices()


def prepare_jax() -> bool:
    """Sets what :func:`configure` sets for threads, last bits and compiled programs, for a user's own program.

    It only takes effect before JAX first uses a device, and must follow the setting of the number of CPU devices. The
    pool of threads has one size for up to eight devices, because bits may depend on it. Compiled programs, the user's
    own too, are kept between runs, unless the user has set JAX's directory for that or the least time of compiling.

    Returns:
        Whether it took effect: JAX hasn't started yet, or started with the same settings.
    """
    if not cache_is_the_users():
        use_compilation_cache()
    threads = roomy_pool(pool_devices(_wanted_cpu_devices()))
    if not has_started():
        os.environ[POOL_VARIABLE] = str(threads)
        add_xla_flags(ONE_THREAD_FLAGS | gpu_flags())
        return True
    platform, present = jax.default_backend(), os.environ.get("XLA_FLAGS", "").split()
    flags = {"cpu": ONE_THREAD_FLAGS, "gpu": GPU_FLAGS}.get(platform, {})
    roomy = platform != "cpu" or int(os.environ.get(POOL_VARIABLE, 0)) >= threads
    return roomy and all(f"--{name}={value}" in present for name, value in flags.items())


def _wanted_cpu_devices() -> int:
    """Returns the number of CPU devices that JAX makes, by its own setting or XLA's flag."""
    flagged = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max([1, jax.config.values["jax_num_cpu_devices"], *map(int, flagged)])


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
    """Returns what must be the same in every process for the same bits: instruction set, versions, device."""
    import gymnasium

    return {
        "machine": machine.machine(),
        "cpu": processor(),
        "cpu capability": instruction_set(),
        "kernel variables": kernel_variables(JAX_VARIABLES),
        "openblas kernel": openblas_kernel(),
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
