"""Times the parts of an iteration whose environments are stepped on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Laps:
    """Holds one iteration's times, in seconds; complete when its update has ended.

    Attributes:
        rollout: stepping environments, and inference.
        learn: from the rollout's end until the host has seen the update end, including what it logs meanwhile.
        other: from the end of the previous update to this rollout: metrics, trackers, proof, checkpoint, evaluation.
        total: from the end of the previous update to the end of this one.
    """

    rollout: float = 0.0
    learn: float = 0.0
    other: float = 0.0
    total: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by name."""
        return {"rollout": self.rollout, "learn": self.learn, "other": self.other}


class Clock:
    """Times iterations when the host collects the next rollout before it reads the results of this update."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts over: earlier time counts for no iteration."""
        self._started = self._mark = time.perf_counter()
        self._laps = Laps()
        self._learning = False

    def rollout_begins(self) -> None:
        """Counts everything since the previous update as other."""
        self._laps = Laps(other=self._lap())

    def rollout_ends(self) -> Laps:
        """Counts everything since the rollout began as rollout.

        Returns the iteration's laps, complete after its update.
        """
        self._laps.rollout, self._learning = self._lap(), True
        return self._laps

    def update_ends(self, laps: Laps | None = None) -> None:
        """Counts everything since the rollout as learn, and begins the next iteration.

        Does nothing if the newest update has ended already, or if ``laps`` are those of an earlier one.
        """
        if self._learning and (laps is None or laps is self._laps):
            self._laps.learn, self._learning = self._lap(), False
            self._laps.total, self._started = self._mark - self._started, self._mark

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds
