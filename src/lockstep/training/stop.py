"""Stopping a run from outside: the first SIGTERM or Ctrl-C asks for an end at the next iteration boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.core.process import STOP_SIGNALS


class StopRequest:
    """Whether a signal asked this process to stop, and which.

    The second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request for as long as the block runs (in the main thread; else never)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
