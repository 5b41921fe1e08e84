"""Decides how many environments a rank gets with ``num_envs_per_rank: auto``, by a table and this machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config.checks import resolve
from lockstep.config.engines import engine_module
from lockstep.config.run import Config
from lockstep.core.host.cgroups import memory_left
from lockstep.core.machine import system_fact
from lockstep.core.topology import available_cores
from lockstep.envs.description import EnvDescription
from lockstep.launch.world import World

GB = 10**9

GPU_ENVS = ((80, 48, 64), (40, 32, 48), (24, 24, 32), (12, 16, 24), (0, 8, 16))
"""Rows of: least GB of a GPU's memory, environments with ``auto``, and with ``max``, which fills the GPU."""
CPU_ENVS_PER_CORE = {"auto": 16, "max": 64}
"""Environments per core of a rank; ``max`` has the longest steps, and most samples a second from array environments."""
ENV_BYTES = 32 * 2**20
"""Bytes of one environment besides its rollout: a simulator's model and state."""
MEMORY_SHARE = 0.5
"""Share of the free memory for environments; the rest is for networks, minibatches and other programs."""

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Resources:
    """What a rank has: CPU cores, bytes of free host memory (None if unknown) and of its GPU's (None without a GPU)."""

    cores: int
    memory: int | None
    device_memory: int | None = None


def available_memory() -> int | None:
    """Returns the bytes of memory that this process may still take, within its cgroups' limits; None if unknown."""
    available = system_fact(MEMINFO, "MemAvailable")
    found = [int(available.split()[0]) * 1024] if available else []
    left = memory_left()
    return min([*found, *([] if left is None else [left])], default=None)


def bytes_per_env(config: Config, description: EnvDescription) -> int:
    """Estimates the bytes of one environment and its part of a rollout, which holds observations several times."""
    width = description.observation.width * np.dtype(description.observation.dtype).itemsize
    return ENV_BYTES + config.num_steps * (3 * width + 64)


def wanted(kind: str, resources: Resources, each: int) -> tuple[int, str]:
    """Returns the table's number of environments, or what memory allows at ``each`` bytes, and the rule in words."""
    if resources.device_memory is not None:
        least, auto, most = next(row for row in GPU_ENVS if resources.device_memory >= row[0] * GB)
        count = auto if kind == "auto" else most
        rule = f"{count} on a GPU of {resources.device_memory / GB:.0f} GB (from {least} GB on)"
    else:
        count = CPU_ENVS_PER_CORE[kind] * resources.cores
        rule = f"{CPU_ENVS_PER_CORE[kind]} for each of {resources.cores} core{'s' if resources.cores > 1 else ''}"
    if resources.memory is not None and count * each > MEMORY_SHARE * resources.memory:
        count = max(1, int(MEMORY_SHARE * resources.memory / each))
        rule += f", but {each / 2**20:.0f} MiB each and {resources.memory / 2**30:.1f} GiB free allow {count}"
    return count, rule


def size(
    config: Config, world: World, resources: Resources, describe: Callable[[], EnvDescription]
) -> tuple[Config, str | None]:
    """Replaces ``num_envs_per_rank: auto`` or ``max`` by a number.

    Args:
        config: not resolved.
        world: the run's ranks; those here share this machine's cores and memory.
        resources: the cores and memory that this process may use, and each rank's GPU.
        describe: returns the environment's description; called only if needed.

    Returns:
        A config with the highest number, up to the table's, that its other settings allow; and one line that says so,
        or None if there was nothing to do.

    Raises:
        ValueError: no number fits; one line.
    """
    kind = config.num_envs_per_rank
    if not isinstance(kind, str):
        return config, None
    memory = None if resources.memory is None else resources.memory // world.ranks_here
    mine = Resources(world.cores_of_rank(resources.cores), memory, resources.device_memory)
    count, rule = wanted(kind, mine, bytes_per_env(config, describe()))
    reason: ValueError | None = None
    for fitting in range(count, 0, -1):
        sized = config.model_copy(update={"num_envs_per_rank": fitting})
        try:
            resolve(sized, world.ranks)
        except ValueError as error:
            reason = reason or error
            continue
        line = f"num_envs_per_rank {kind}: {rule}"
        if fitting < count:
            line += f"; {fitting} is the next that shards and minibatches allow"
        return sized, f"{line}; --num-envs-per-rank N overrides it"
    assert reason is not None
    raise reason


def resolved_here(config: Config, world: World, describe: Callable[[], EnvDescription]) -> tuple[Config, list[str]]:
    """Resolves a config for this machine and these ranks, including ``num_envs_per_rank: auto``.

    ``describe`` is called only if needed.

    Returns:
        The config, and lines that tell the user how ``num_envs`` was found.

    Raises:
        ValueError: something doesn't fit; one line.
    """
    lines: list[str] = []
    if isinstance(config.num_envs_per_rank, str):
        device_memory = None
        if config.device != "cpu":
            engine = engine_module(config.engine)
            engine.check_device(config.device, world.ranks_here)
            device_memory = engine.device_memory(config.device)
        resources = Resources(available_cores(), available_memory(), device_memory)
        config, rule = size(config, world, resources, describe)
        lines += [rule or ""]
    per_rank = config.num_envs_per_rank
    config = resolve(config, world.ranks)
    if per_rank is not None:
        one = "rank" if world.devices is None else "device"
        ranks = f"{world.ranks} {one}{'s' if world.ranks > 1 else ''}"
        lines.append(
            f"num_envs_per_rank {per_rank} on {ranks}: num_envs {config.num_envs}; on another number of {one}s it is "
            "another run"
        )
    return config, lines
