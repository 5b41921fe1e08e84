"""Settles, for all ranks together, the number of worker processes that step their environments."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.config.run import EnvConfig
from lockstep.core.host.cgroups import cpu_limit
from lockstep.core.machine import BOOT
from lockstep.core.process import fail_now
from lockstep.core.topology import Topology, bound_cores
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.choose_workers import Measured, chosen_workers, measure_step


def settle_workers(
    config: EnvConfig,
    description: EnvDescription,
    num_envs: int,
    topology: Topology,
    gather_json: Callable[[Any], list[Any]],
) -> tuple[EnvConfig, str | None]:
    """Replaces ``workers: auto`` by a number; returns the config and a line that explains the number, or None.

    ``num_envs`` is the number of this rank's environments. If environments are stepped one by one, ``auto`` measures a
    step and is a collective; otherwise ``auto`` is 0, without a line. The number doesn't affect the bits of a run.
    """
    if config.workers != "auto":
        return config, None
    if config.jax_only or config.backend in ("tensor", "envpool") or description.is_array:
        return config.model_copy(update={"workers": 0}), None
    seconds = measure_step(config, description, fail_now)
    cores = [bound_cores(), place_of_process(), cpu_limit(), topology.cores]
    gathered = gather_json([seconds, num_envs, cores])
    shares = cores_of_ranks([cores for *_, cores in gathered])
    everyone = [Measured(seconds, envs, share) for (seconds, envs, _), share in zip(gathered, shares, strict=True)]
    workers = chosen_workers(everyone)
    where = f"{workers} worker processes a rank" if workers else "environments are stepped in the rank itself"
    slowest = max(rank.step_seconds for rank in everyone)
    fewest = min(rank.cores for rank in everyone)
    why = f"a step of one takes {_short(slowest)}, and a rank has {fewest} core{'' if fewest == 1 else 's'}"
    return config.model_copy(update={"workers": workers}), f"env.workers auto: {where} ({why})"


def cores_of_ranks(facts: Sequence[Sequence[Any]]) -> list[int]:
    """Returns each rank's share of CPU cores, at least one.

    Args:
        facts: for each rank: the number of cores that it is bound to; its place (:func:`place_of_process`), as ranks of
            one place share their cores; its container's limit, which all ranks of a host share, or None; and the
            number of cores that the launcher gave this rank alone, or None.
    """
    places = [place for _, place, _, _ in facts]
    hosts, found = [host for host, _ in places], []
    for bound, place, limit, given in facts:
        share = min(bound // places.count(place), bound if given is None else given)
        found.append(max(1, share if limit is None else min(share, limit // hosts.count(place[0]))))
    return found


def place_of_process() -> list[Any]:
    """Returns this host and the cores that this process may use; processes with an equal place share these cores.

    A launcher may have bound each process to its own cores, and several hosts may have one name.
    """
    bound = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return [f"{socket.gethostname()} {boot}", bound]


def _short(seconds: float) -> str:
    """Formats seconds as ``35 µs``, ``1.2 ms`` or ``3 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds * 1e6:.2g} µs"
