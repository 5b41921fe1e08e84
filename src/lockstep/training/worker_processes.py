"""Settles, for all ranks alike, in how many worker processes their environments are stepped."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from lockstep.config.run import EnvConfig
from lockstep.core.machine import BOOT
from lockstep.core.process import fail_now
from lockstep.core.topology import Topology, available_cores
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.choose_workers import Measured, chosen_workers, measure_step


def settle_workers(
    config: EnvConfig,
    description: EnvDescription,
    num_envs: int,
    topology: Topology,
    gather_json: Callable[[Any], list[Any]],
) -> tuple[EnvConfig, str | None]:
    """Gives the config with a number where ``workers`` is ``auto``, and a line that says so; a collective then.

    ``num_envs`` are this rank's. Nothing is measured, and no line written, where environments aren't stepped one by
    one. The number can't show in the bits of a run.
    """
    if config.workers != "auto":
        return config, None
    if config.jax_only or config.backend in ("tensor", "envpool") or description.is_array:
        return config.model_copy(update={"workers": 0}), None
    seconds = measure_step(config, description, fail_now)
    gathered = gather_json([seconds, num_envs, available_cores(), place_of_process(), topology.cores])
    places = [place for *_, place, _ in gathered]
    everyone = [
        Measured(seconds, num_envs, max(1, min(cores // places.count(place), cores if given is None else given)))
        for seconds, num_envs, cores, place, given in gathered
    ]
    workers = chosen_workers(everyone)
    where = f"{workers} worker processes a rank" if workers else "environments are stepped in the rank itself"
    slowest = max(rank.step_seconds for rank in everyone)
    fewest = min(rank.cores for rank in everyone)
    why = f"a step of one takes {_short(slowest)}, and a rank has {fewest} core{'' if fewest == 1 else 's'}"
    return config.model_copy(update={"workers": workers}), f"env.workers auto: {where} ({why})"


def place_of_process() -> list[Any]:
    """This host and the numbers of the cores that this process may use, which those of the same place share.

    A launcher may have bound each process to cores of its own, and hosts may have one name.
    """
    bound = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return [f"{socket.gethostname()} {boot}", bound]


def _short(seconds: float) -> str:
    """Writes ``35 µs``, ``1.2 ms``, ``3 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds * 1e6:.2g} µs"
