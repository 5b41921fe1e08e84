"""Decides when something is due: after a number of iterations, or by the clock.

By the clock the state is saved on disk at a fixed interval, and in memory as often as that is cheap.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from lockstep.config.run import Config
from lockstep.training.stop import KEEP, RUNNING, SAVE

COST = 0.02
"""Largest share of the time spent on keeping states in memory."""
RECENT = 5
"""Number of states over which the median cost is taken."""
SOONEST = 0.5
"""Shortest time between two of them, in seconds; a lost rank then costs about a second at least."""


def comes_due(interval: int, iteration: int) -> bool:
    """Returns whether something due every ``interval`` iterations (0: never) is due after this one."""
    return interval > 0 and iteration % interval == 0


def evaluation_due(config: Config, iteration: int) -> bool:
    """Returns whether the policy is evaluated after this iteration: at every interval, and at the end of the run."""
    interval = config.eval.interval
    return interval > 0 and (comes_due(interval, iteration) or iteration >= config.num_iterations)


class Keeper:
    """Decides by the clock when the state is saved, on the rank that writes; the stop code tells the others.

    Args:
        seconds: time between checkpoints on disk; None: they aren't saved by the clock.
        keeps: whether states are kept in memory for a launcher that restarts ranks.
        clock: a monotonic clock, in seconds.

    Attributes:
        every: seconds between two states in memory, from the costs of the last ones without the very first.
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
        """Records a checkpoint on disk, which also serves as a state to resume from."""
        self._saved = self._kept = self._clock()

    def kept(self, cost: float) -> None:
        """Records a state in memory that took ``cost`` seconds, from which the time of the next one follows."""
        self._kept = self._clock()
        if self._costs is None:
            self._costs = deque(maxlen=RECENT)
            return
        self._costs.append(cost)
        self.every = max(SOONEST, statistics.median(self._costs) / COST)

    def stop_keeping(self) -> None:
        """Asks for no more states in memory, because there is no place for them."""
        self._keeps = False
