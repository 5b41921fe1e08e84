"""When something is due: after so many iterations, or by the clock.

By the clock the state is saved on the disk every so many seconds, in memory as often as that is cheap.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from lockstep.config.run import Config
from lockstep.training.stop import KEEP, RUNNING, SAVE

COST = 0.02
"""Of the time may go into states that are kept in memory."""
RECENT = 5
"""States whose median cost counts."""
SOONEST = 0.5
"""Seconds between two of them at least: what a rank that is lost costs is bounded by a second, not by less."""


def comes_due(interval: int, iteration: int) -> bool:
    """Tells whether what is due every ``interval`` iterations (0: never) is due after this one."""
    return interval > 0 and iteration % interval == 0


def evaluation_due(config: Config, iteration: int) -> bool:
    """Tells whether the policy is evaluated after this iteration: at every interval, and at the end of the run."""
    interval = config.eval.interval
    return interval > 0 and (comes_due(interval, iteration) or iteration >= config.num_iterations)


class Keeper:
    """Asks for the state to be saved, on the rank that writes; the others learn it with the stop code.

    Args:
        seconds: between checkpoints on the disk; None: they aren't saved by the clock.
        keeps: whether there is memory in which states are kept for a launcher that starts ranks again.
        clock: seconds by a monotonic clock.

    Attributes:
        every: seconds between two states in memory, by what the last ones cost, but for the very first.
    """

    def __init__(self, seconds: float | None, keeps: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._keeps, self._clock = seconds, keeps, clock
        self._saved = self._kept = clock()
        self._costs: deque[float] | None = None
        self.every = SOONEST

    def asks(self) -> int:
        """Returns ``SAVE``, ``KEEP`` or ``RUNNING``."""
        now = self._clock()
        if self._seconds is not None and now - self._saved >= self._seconds:
            return SAVE
        return KEEP if self._keeps and now - self._kept >= self.every else RUNNING

    def saved(self) -> None:
        """Takes note of a checkpoint on the disk, which is a state to go on from as well."""
        self._saved = self._kept = self._clock()

    def kept(self, cost: float) -> None:
        """Takes note of a state in memory that took ``cost`` seconds, which decides when the next one is due."""
        self._kept = self._clock()
        if self._costs is None:
            self._costs = deque(maxlen=RECENT)
            return
        self._costs.append(cost)
        self.every = max(SOONEST, statistics.median(self._costs) / COST)

    def stop_keeping(self) -> None:
        """Ask for no more states in memory, where there is no place for them."""
        self._keeps = False
