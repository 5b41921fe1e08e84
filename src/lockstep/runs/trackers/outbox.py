"""Sends what a tracker hands over to its service from a thread, in order, so that a service never holds up training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MOST_WAITING = 10_000
"""Items that may wait for a service that doesn't answer; more would fill the memory."""
SILENT_SECONDS, END_SECONDS = 10.0, 60.0
"""At the end: seconds to wait for a service that takes nothing, and for all that waits while it takes something."""


class _Waiting(NamedTuple, Generic[Item]):
    item: Item
    alone: bool
    slow: bool


class Outbox(Generic[Item]):
    """Items on their way to a service.

    Args:
        send: sends some items, which aren't empty, or raises; it is called in the outbox's thread only.
        most_at_once: items that ``send`` gets in one call, if so many wait.
    """

    def __init__(self, send: Callable[[Sequence[Item]], None], most_at_once: int) -> None:
        self._send, self._most_at_once = send, most_at_once
        self._waiting: deque[_Waiting[Item]] = deque()
        self._sending: list[_Waiting[Item]] = []
        self._sent = 0
        self._error: Exception | None = None
        self._over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._send_on, name="tracker", daemon=True).start()

    def put(self, item: Item, alone: bool = False, slow: bool = False) -> None:
        """Hands over an item, and returns at once.

        Args:
            item: to send.
            alone: whether ``send`` gets it in a call of its own.
            slow: whether sending it may take long though the service is well, as a file may.

        Raises:
            Exception: that with which sending an earlier one failed.
            TimeoutError: too many wait already; one line. After either, nothing is sent any more.
        """
        with self._changed:
            self._check()
            if len(self._waiting) >= MOST_WAITING:
                self._error = TimeoutError(
                    f"it is silent or too slow: {MOST_WAITING:,} messages wait, which is the limit"
                )
                self._end()
                raise self._error
            self._waiting.append(_Waiting(item, alone, slow))
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything is sent, but ends with what isn't after ``SILENT_SECONDS`` and ``END_SECONDS``.

        A slow item, while it is sent, has all of ``END_SECONDS``.

        Raises:
            Exception: that with which sending failed.
            TimeoutError: something isn't sent, and won't be; one line.
        """
        deadline = time.monotonic() + END_SECONDS
        with self._changed:
            while self._error is None and (left := self._left()):
                most = END_SECONDS if self._is_slow() else SILENT_SECONDS
                seconds = min(most, max(0.0, deadline - time.monotonic()))
                sent = self._sent
                if not self._changed.wait_for(lambda sent=sent: self._error or self._sent > sent, seconds):
                    self._end()
                    raise TimeoutError(f"it is silent or too slow: no answer in time to the last {left:,} messages")
            self._end()
            self._check()

    def _left(self) -> int:
        return len(self._waiting) + len(self._sending)

    def _is_slow(self) -> bool:
        """Tells whether what is being sent, or is next, may take long."""
        return any(one.slow for one in self._sending or [self._waiting[0]])

    def _end(self) -> None:
        self._over = True
        self._waiting.clear()
        self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _send_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if self._over:
                    return
                self._sending = batch = self._next_batch()
            try:
                self._send([one.item for one in batch])
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._end()
                return
            with self._changed:
                self._sent, self._sending = self._sent + len(batch), []
                self._changed.notify_all()

    def _next_batch(self) -> list[_Waiting[Item]]:
        batch = [self._waiting.popleft()]
        while self._waiting and len(batch) < self._most_at_once and not (batch[0].alone or self._waiting[0].alone):
            batch.append(self._waiting.popleft())
        return batch
