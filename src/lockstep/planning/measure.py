"""Measures one-rank runs on this machine, each of one rank's shards, as many at once as ranks would share it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.run import Config
from lockstep.core.errors import RunError
from lockstep.core.tree import tree_of
from lockstep.scaling.measure import side_by_side, start_training, stop
from lockstep.scaling.plan import Plan

POLL_SECONDS = 0.05
COPIED_BYTES = 1 << 25

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RankTimes:
    """Seconds of each iteration of one rank by itself, ``[iterations]``, and its peak memory in bytes.

    ``rollout``, ``learn`` and ``other`` are empty if its program doesn't tell them apart (engine jax).
    """

    total: np.ndarray
    rollout: np.ndarray
    learn: np.ndarray
    other: np.ndarray
    memory: float


def part_of_rank(config: Config, rank: int, ranks: int) -> Config:
    """Returns the config of a one-rank run with as many shards, of the same shape, as one of ``ranks`` owns."""
    shards = len(tree_of(config.shards, ranks).owned[rank])
    envs = config.envs // config.shards * shards
    cut = config.model_copy(update={"num_envs": envs, "num_shards": shards, "fsdp": False, "sync_period": 1})
    return Plan(cut, "strong", (1,)).sized(1)


def measure_ranks(
    config: Config, ranks: Sequence[int], of: int, directory: Path, warmup_iters: int, iters: int
) -> list[RankTimes]:
    """Trains the parts of these ``ranks``, of ``of`` in all, at once, as one-rank runs that never communicate.

    The first ``warmup_iters`` iterations of each are left out. It goes on until each has done ``iters`` iterations
    while all the others ran, too.

    Raises:
        RunError: one of the runs failed; the message has its error.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    trainings = []
    try:
        for number, rank in enumerate(ranks):
            own = part_of_rank(config, rank, of)
            trainings.append(start_training(own, 1, f"rank_{number}", directory, None))
        while True:
            running = [training.watch() for training in trainings]
            failed = next((t for t, runs in zip(trainings, running, strict=True) if not runs), None)
            if failed is not None:
                raise RunError(f"a run of one rank failed: {failed.error()}")
            flags = side_by_side([t.records for t in trainings], warmup_iters)
            if min(map(sum, flags)) >= iters:
                break
            time.sleep(POLL_SECONDS)
    finally:
        stop(trainings)
        shutil.rmtree(directory, ignore_errors=True)
    return [
        _times([r for r, counts in zip(t.records, own, strict=False) if counts])
        for t, own in zip(trainings, flags, strict=True)
    ]


def _times(records: Sequence[dict[str, Any]]) -> RankTimes:
    def of(name: str) -> np.ndarray:
        return np.array([r[name][0] for r in records if r.get(name) is not None], np.float64)

    told = all(name in records[0] for name in ("t_rollout", "t_learn", "t_other"))
    parts = [of(name) if told else np.zeros(0) for name in ("t_rollout", "t_learn", "t_other")]
    peaks = [max(r["peak_memory_mb"]) for r in records if r.get("peak_memory_mb")]
    return RankTimes(of("t_iter"), *parts, memory=max(peaks, default=0.0) * 2**20)


def copy_rate() -> float:
    """Measures how many bytes per second this process copies in memory; the best of five tries."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.empty(COPIED_BYTES, np.uint8)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return COPIED_BYTES / best
