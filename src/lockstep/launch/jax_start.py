"""JAX is set up before the first look at an environment of its own, for to look at one is to start JAX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from lockstep.config.run import EnvConfig, RunOptions
from lockstep.core.shards import MAX_DEFAULT_SHARDS
from lockstep.core.topology import available_cores
from lockstep.launch.world import topology_of
from lockstep.policies.videos import has_screen


def start_jax(env: EnvConfig, settings: Mapping[str, Any], options: RunOptions) -> None:
    """Set JAX up for a run, if it is to be looked at by JAX or runs on accelerators; a second call does nothing.

    How many devices the run will use is known only when its environment is: a CPU becomes as many as could be meant,
    and the run takes the first ones. A launcher's processes meet here, which must be before JAX starts. A process that
    will only start the others looks with its CPU, for who starts JAX on a GPU holds its memory. MuJoCo, where
    pictures will be asked for, chooses its graphics library when it is imported: that is said here too.

    Args:
        env: the environment.
        settings: of the run, nested, as far as they are known; they may not have been checked yet.
        options: the user's.

    Raises:
        ValueError: this machine has no such device; one line.
    """
    device, by_jax = settings.get("device") or "cpu", settings.get("engine") == "jax"
    custom = (settings.get("network") or {}).get("custom")
    if not (env.jax_only or (by_jax and (custom or device != "cpu"))):
        return
    if settings.get("eval", {}).get("record_video") not in (None, False, "false") and not has_screen():
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        processes = importlib.import_module("lockstep.jax_engine.distributed.processes")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lockstep"):
            raise
        return  # whoever looks at the environment says what is missing
    topology = topology_of(options)
    set_up = importlib.import_module("lockstep.jax_engine.setup.set_up")
    devices = min(set_up.MOST_DEVICES, _most_devices(settings, options)) if device == "cpu" else None
    accelerators = None if device == "cpu" else options.devices
    if device != "cpu" and not topology.launched and options.nproc != 1:
        device = "cpu"
    pool = set_up.roomy_pool(max(devices or 1, set_up.pool_devices(_shards(settings))))
    processes.set_up_jax(1, device, devices, topology, pool, accelerators)


def _most_devices(settings: Mapping[str, Any], options: RunOptions) -> int:
    """As many CPU devices as the run may use: no more than cores and shards, where nobody says a number."""
    if options.simulate_devices or options.devices:
        return options.simulate_devices or options.devices or 1
    cores, shards = available_cores(), _shards(settings)
    if shards is not None:
        return min(cores, shards)
    return cores if settings.get("num_envs_per_rank") else min(cores, MAX_DEFAULT_SHARDS)


def _shards(settings: Mapping[str, Any]) -> int | None:
    """The number of shards, where somebody says one."""
    shards = str(settings.get("num_shards") or "")
    return int(shards) if shards.isdigit() else None
