"""Measures where the wall time of an iteration goes, on every rank: its parts, and the collectives apart from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.core.machine import peak_resident
from lockstep.torch_engine.setup import accelerator

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.communicator import Communicator


@dataclass(frozen=True)
class Laps:
    """Holds the times of one iteration on one rank, in seconds; the parts are without the collectives in them.

    Attributes:
        rollout: stepping environments, inference and advantages.
        learn: statistics and the update.
        other: what came between the last iteration and this one: metrics, trackers, proof, checkpoint, evaluation.
        total: from the end of the last iteration to the end of this one.
        ended: ``time.monotonic()`` of the end.
        bytes_sent: that this rank sent in collectives; ``bytes_received``: those from other ranks.
        peak_memory_mb: the most memory that the process has held so far, in MiB; 0 if not measured.
        peak_gpu_memory_mb: the same of its GPU's memory.
    """

    rollout: float = 0.0
    learn: float = 0.0
    other: float = 0.0
    total: float = 0.0
    ended: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0
    peak_memory_mb: float = 0.0
    peak_gpu_memory_mb: float = 0.0

    def numbers(self) -> list[float]:
        """Lists every attribute, in order."""
        return [float(getattr(self, field.name)) for field in fields(self)]


class Clock:
    """Measures the iterations of one rank, part by part, without its collectives.

    With ``thorough`` it waits for an accelerator at the end of each part, and reads peak memory.
    """

    def __init__(self, communicator: Communicator, thorough: bool = False) -> None:
        self._communicator, self._thorough = communicator, thorough
        self.begin()

    def begin(self) -> None:
        """Starts over: time before this, collectives included, belongs to no iteration."""
        self._communicator.take_durations()
        self._start(time.perf_counter())

    def _start(self, now: float) -> None:
        self._parts = {"rollout": 0.0, "learn": 0.0, "other": 0.0}
        self._durations: list[float] = []
        self._traffic = self._communicator.traffic
        self._started = self._mark = now

    def lap(self, part: str) -> None:
        """Counts the time since the last lap as ``rollout``, ``learn`` or ``other``, without the collectives."""
        if self._thorough:
            accelerator.synchronize(self._communicator.device)
        now, collectives = time.perf_counter(), self._communicator.take_durations()
        self._parts[part] += now - self._mark - sum(collectives)
        self._durations += collectives
        self._mark = now

    def finish(self) -> tuple[Laps, list[float]]:
        """Ends the iteration and begins the next one; returns its laps, and the seconds of each of its collectives."""
        now, ended = time.perf_counter(), time.monotonic()
        memory = peak_memory(self._communicator.device) if self._thorough else {}
        moved, durations = zip(self._communicator.traffic, self._traffic, strict=True), self._durations
        sent, received = (after - before for after, before in moved)
        spent = {"total": now - self._started, "ended": ended, "bytes_sent": sent, "bytes_received": received}
        laps = Laps(**self._parts, **spent, **memory)
        self._start(now)
        return laps, durations


@dataclass(frozen=True)
class RankTimes:
    """Holds the times of one iteration on all ranks, the same on every rank.

    Attributes:
        laps: each rank's, in rank order.
        comm: seconds in collectives that even the last rank to arrive spent, summed over the collectives.
        wait: seconds that each rank spent in collectives beyond that: waiting for the last one to arrive.
        collectives: their number.
    """

    laps: tuple[Laps, ...]
    comm: float
    wait: tuple[float, ...]
    collectives: int

    @classmethod
    def of(cls, numbers: np.ndarray, durations: np.ndarray) -> RankTimes:
        """Reads every rank's ``Laps.numbers()`` ``[world_size, 9]`` and collectives' seconds ``[world_size, n]``."""
        comm = durations.min(0).sum()
        wait = durations.sum(1) - comm
        return cls(tuple(Laps(*row) for row in numbers.tolist()), float(comm), tuple(wait.tolist()), durations.shape[1])

    def metrics(self, steps: int) -> dict[str, float]:
        """Returns ``time/…`` of the metrics record, means over ranks; ``steps`` are those of all environments.

        ``time/waited_for`` is the rank that the others waited for: the one that waited least itself.
        """
        total = self._mean("total")
        waited_for = {"time/waited_for": int(np.argmin(self.wait))} if len(self.wait) > 1 else {}
        return waited_for | {
            "time/t_rollout": self._mean("rollout"),
            "time/t_learn": self._mean("learn"),
            "time/t_comm": self.comm,
            "time/t_wait": sum(self.wait) / len(self.wait),
            "time/t_other": self._mean("other"),
            "time/t_iter": total,
            "time/global_fps": steps / total if total else 0.0,
        }

    def by_rank(self, iteration: int, steps: int) -> dict[str, Any]:
        """Returns one object of ``timing.jsonl``, in seconds, with a list over ranks for all that ranks differ in."""
        return {
            "iteration": iteration,
            "steps": steps,
            "ended": max(laps.ended for laps in self.laps),
            "collectives": self.collectives,
            "t_iter": [laps.total for laps in self.laps],
            "t_rollout": [laps.rollout for laps in self.laps],
            "t_learn": [laps.learn for laps in self.laps],
            "t_comm": [self.comm for _ in self.laps],
            "t_wait": list(self.wait),
            "t_other": [laps.other for laps in self.laps],
            "bytes": [int(laps.bytes_sent) for laps in self.laps],
            "bytes_received": [int(laps.bytes_received) for laps in self.laps],
            "peak_memory_mb": [laps.peak_memory_mb for laps in self.laps],
            "peak_gpu_memory_mb": [laps.peak_gpu_memory_mb for laps in self.laps],
        }

    def _mean(self, part: str) -> float:
        return sum(getattr(laps, part) for laps in self.laps) / len(self.laps)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Returns the most memory in MiB that this process has held: of the host, without its workers, and of its GPU."""
    return {"peak_memory_mb": peak_resident(), "peak_gpu_memory_mb": accelerator.peak_memory(device)}
