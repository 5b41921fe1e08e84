"""When a run ends or is saved: codes that ranks agree on, limits of a session, and stop signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.process import handling_stop_signals, is_passed_on, stop_signals
from lockstep.core.topology import started_by_lockstep

RUNNING, KEEP, SAVE, TIME_LIMIT, CALLBACK = 0, 1, 2, 3, 4
"""Codes: keep the state in memory, save a checkpoint, or stop. Ranks agree on the highest that any of them asks for. A
signal's code is ``128 + n``.
"""
STEP_LIMIT, FINISHED = -1, -2
STATUS = {FINISHED: "finished", STEP_LIMIT: "stopped at step", TIME_LIMIT: "stopped at time limit"}
STATUS[CALLBACK] = "stopped by a callback"
SIGNALLED = 128


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended.

    Attributes:
        status: ``finished``, ``stopped at step``, ``stopped at time limit``, ``stopped by a callback`` or
            ``stopped by signal N``.
        signal: the signal that stopped it, or None.
        summary: the content of ``summary.json``.
    """

    status: str
    signal: int | None
    summary: dict[str, Any]


class StopRequest:
    """Records the signal that asked this process to stop, if any.

    The second Ctrl-C interrupts at once, but not in a rank: its launcher ends it then, and passes on signals that the
    rank may get as well.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self.taken: list[signal.Signals] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal by recording it."""
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            if started_by_lockstep() or is_passed_on(self._since):
                return
            raise KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()

    def take_signals(self) -> None:
        """Handles stop signals again, if an environment or a network has set handlers of its own.

        Does nothing outside the block of :func:`stop_requests`.
        """
        for number in self.taken:
            signal.signal(number, self)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns stop signals into a request during the block (only in the main thread)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    request.taken = stop_signals()  # by what was ignored before anybody else set handlers
    try:
        with handling_stop_signals(request):
            yield request
    finally:
        request.taken = []


def stop_code(request: StopRequest, options: RunOptions, started: float) -> int:
    """Returns the code that this rank asks for: of a signal, of the time limit since ``started``, or ``RUNNING``."""
    request.take_signals()  # a reset or a step may have set a handler too
    if request.signal is not None:
        return SIGNALLED + request.signal
    limit = options.max_hours
    return TIME_LIMIT if limit is not None and time.monotonic() - started > 3600 * limit else RUNNING


def stops(asked: int) -> int:
    """Returns the stop code that ranks agreed on; ``RUNNING`` if they only save."""
    return asked if asked >= TIME_LIMIT else RUNNING


def reached(config: Config, options: RunOptions, iteration: int, global_step: int) -> int:
    """Returns the code of the step limit that these counters reach, or ``RUNNING``; the same on all ranks."""
    if iteration >= config.num_iterations:
        return FINISHED
    stop_at = options.stop_at_step
    return STEP_LIMIT if stop_at is not None and global_step >= stop_at else RUNNING


def status_of(stop: int) -> tuple[str, int | None]:
    """Returns a stop code in words, and its signal, if any."""
    if stop > SIGNALLED:
        return f"stopped by signal {stop - SIGNALLED}", stop - SIGNALLED
    return STATUS[stop], None
