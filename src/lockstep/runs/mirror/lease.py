"""Keeps a run on a mirror to one writer by a file that its holder renews; no clock is compared with another host's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.machine import BOOT
from lockstep.core.process import started_at
from lockstep.runs.mirror.place import MirrorError, Place

LEASE = "writer.json"
RENEW_SECONDS = 5.0
PATIENCE_SECONDS = 20.0
"""A lease unchanged for so long belongs to a writer that is gone: a live one renews it four times in that time."""
_POLL_SECONDS = 0.5
_GIVE_BACK_SECONDS = 5.0
"""Seconds for which an ending process waits for a mirror that doesn't answer."""
_PID_SPACE = Path("/proc/self/ns/pid")


def _machine() -> list[str]:
    """Identifies the machine and the namespace in which process ids are valid; empty if unknown."""
    try:
        return [socket.gethostname(), BOOT.read_text().strip(), os.readlink(_PID_SPACE)]
    except OSError:
        return []


class LeaseLostError(MirrorError):
    """Raised if another process now writes this run on the mirror."""


class LeaseGoneError(MirrorError):
    """Raised if nobody's lease is there: the place was emptied, or it is away, as a share that isn't mounted."""


class Lease:
    """The right to write one run on a mirror, held by this process until it is given back.

    Args:
        place: of the run.
        patience: seconds for which another's lease is watched before it counts as left behind.
        clock: returns seconds of a monotonic clock.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        place: Place,
        patience: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._place, self._patience, self._clock, self._sleep = place, patience, clock, sleep
        self._tokens, self._beat = [secrets.token_hex(8)], 0  # the last one is that of the place as it is known
        self._renewed = clock()
        self._over, self._writing = threading.Event(), threading.Lock()

    def take(self) -> None:
        """Takes the lease, if need be from a writer that is gone.

        Raises:
            MirrorError: another process writes this run, or the mirror can't be reached.
        """
        while not self._place.create(LEASE, self._content()):
            if self._left_behind():
                self._place.write(LEASE, self._content())
                self._sleep(_POLL_SECONDS)  # others that waited may write it too: the last one has it
                break
        if not self.is_ours():
            raise MirrorError(f"{self._place.url} is being written by another process, which came first")
        self._renewed = self._clock()

    def _left_behind(self) -> bool:
        """Waits until the lease's holder is gone; returns whether the lease is still there.

        Raises:
            MirrorError: the holder renews it.
        """
        before, deadline = self._place.read(LEASE), self._clock() + self._patience
        while before is not None and not _is_gone(before) and self._clock() < deadline:
            self._sleep(_POLL_SECONDS)
            now = self._place.read(LEASE)
            if now is not None and now != before:
                raise MirrorError(
                    f"{self._place.url} is being written by {_who(now)}; wait for it or stop it, or give another --name"
                )
            before = now
        return before is not None

    def keep(self) -> None:
        """Renews the lease from now on, in a thread, until it is given back."""
        threading.Thread(target=self._renew_on, name="mirror-lease", daemon=True).start()

    def _renew_on(self) -> None:
        while not self._over.wait(RENEW_SECONDS / 2):
            with contextlib.suppress(Exception):  # the copier reports it
                self.renew()

    def renew(self) -> None:
        """Rewrites the lease to show that its holder lives, if it is due and no other process has taken it."""
        with self._writing:
            if self._over.is_set() or self._clock() - self._renewed < RENEW_SECONDS:
                return
            token = self._token_there()
            if token not in self._tokens:
                return
            self._beat += 1
            self._place.write(LEASE, self._content(token))
            self._renewed = self._clock()

    def is_ours(self) -> bool:
        """Tells whether this process still has the lease."""
        return self._token_there() in self._tokens

    def check(self) -> bool:
        """Returns whether the place is the one that this process last wrote to.

        It isn't if the lease was taken again while the place was away, and what was there before has come back.

        Raises:
            LeaseLostError: another process has the lease, or it was given back.
            LeaseGoneError: nobody has it.
        """
        token = self._token_there()
        if self._over.is_set():
            raise LeaseLostError(f"{self._place.url} was given back")
        if token is None:
            raise LeaseGoneError(f"{self._place.url} has lost its {LEASE}, and perhaps all else")
        if token not in self._tokens:
            raise LeaseLostError(f"{self._place.url} is written by another process now")
        with self._writing:
            is_known = token == self._tokens[-1]
            self._tokens = sorted(self._tokens, key=lambda one: one == token)  # a list that is being sorted looks empty
        return is_known

    def take_again(self) -> None:
        """Takes a lease that is gone, if nobody else has done so; :meth:`check` says who has it."""
        with self._writing:
            if self._over.is_set():
                return
            self._tokens.append(secrets.token_hex(8))
            if not self._place.create(LEASE, self._content()):
                self._tokens.pop()

    def _token_there(self) -> str | None:
        """Returns the token of the lease that is there: None if there is no file, empty if it says nothing."""
        content = self._place.read(LEASE)
        return None if content is None else str(_parsed(content).get("token", ""))

    def give_back(self) -> None:
        """Removes the lease, so that others can write the run; if that takes too long, the lease is left behind."""
        self._over.set()
        thread = threading.Thread(target=self._remove, name="mirror-lease-end", daemon=True)
        thread.start()
        thread.join(_GIVE_BACK_SECONDS)

    def _remove(self) -> None:
        with self._writing, contextlib.suppress(Exception):
            if self.is_ours():
                self._place.remove([LEASE])

    def _content(self, token: str | None = None) -> bytes:
        pid = os.getpid()
        return json.dumps(
            {
                "token": token or self._tokens[-1],
                "host": socket.gethostname(),
                "pid": pid,
                "machine": _machine(),
                "started": started_at(pid),
                "beat": self._beat,
            }
        ).encode()


def _parsed(content: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(content: bytes) -> bool:
    """Tells whether the holder was a process of this machine that doesn't exist any more."""
    holder = _parsed(content)
    here = bool(holder.get("machine")) and holder.get("machine") == _machine()
    return here and isinstance(holder.get("pid"), int) and started_at(holder["pid"]) != holder.get("started")


def _who(content: bytes) -> str:
    holder = _parsed(content)
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
