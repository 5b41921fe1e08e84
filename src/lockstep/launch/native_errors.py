"""Passes on what libraries in ranks write to standard error, except for what they write because another rank failed.

When one rank fails, JAX's coordination service aborts the others and prints the stacks of their C++ threads. The
launcher says in one line which rank ended, and how.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper

VARIABLE = "LOCKSTEP_NATIVE_ERRORS"
"""Names the descriptor to which a rank's libraries, and not Python itself, write standard error."""
HOLD_SECONDS = 0.2
"""How long a text is held, because a rank may write it before it is known here that another has ended."""
LAST_SECONDS = 5.0
_CHUNK = 1 << 16
_MOST_HELD = 1 << 10


class NativeErrors:
    """Reads the native standard errors of a run's ranks, in the process that has started them."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._held: list[tuple[float, int, bytes]] = []
        self._failed: int | None = None

    def pipe(self, rank: int) -> int:
        """Makes a rank's pipe; returns the descriptor into which it writes, which the caller closes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._ranks[reading] = rank
        return writing

    @property
    def descriptors(self) -> list[int]:
        """The descriptors to wait for."""
        return list(self._ranks)

    @property
    def waits(self) -> bool:
        """Whether texts are held that are yet to be passed on."""
        return bool(self._held)

    def read(self, ready: Iterable[object]) -> None:
        """Reads what there is from the descriptors in ``ready``."""
        for descriptor in [fd for fd in self._ranks if fd in ready]:
            text = b""
            with contextlib.suppress(BlockingIOError):
                text = os.read(descriptor, _CHUNK)
                if not text:
                    del self._ranks[descriptor]
                    os.close(descriptor)
                    continue
            if len(self._held) < _MOST_HELD:  # else it is dropped: nobody reads, and the ranks must not wait
                self._held.append((time.monotonic(), self._ranks[descriptor], text))

    def ended(self, rank: int, code: int) -> None:
        """Notes the end of a rank, of which the first to fail matters."""
        if code and self._failed is None:
            self._failed = rank

    def pass_on(self, everything: bool = False) -> None:
        """Writes texts that were held for long enough; once a rank has failed, only that rank's."""
        due = time.monotonic() - HOLD_SECONDS
        while self._held and (everything or self._held[0][0] < due):
            _, rank, text = self._held.pop(0)
            if self._failed not in (None, rank):
                continue
            rest = _write(text)
            if rest:  # the reader is slow, and the ranks must not wait for it
                self._held.insert(0, (0.0, rank, rest))
                return

    def close(self) -> None:
        """Passes on what is left, once the ranks have ended."""
        self.read(self.descriptors)
        deadline = time.monotonic() + LAST_SECONDS
        self.pass_on(everything=True)
        while self._held and time.monotonic() < deadline:  # the reader is slow
            select.select([], [2], [], HOLD_SECONDS)
            self.pass_on(everything=True)
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()


def _write(text: bytes) -> bytes:
    """Writes to standard error what it takes without waiting; returns the rest."""
    with contextlib.suppress(OSError, ValueError):
        while text and select.select([], [2], [], 0)[1]:
            text = text[os.write(2, text[: select.PIPE_BUF]) :]
        return text
    return b""


def write_natively_elsewhere() -> None:
    """Sends what libraries of this process write to standard error to the launcher's pipe; Python keeps its own."""
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return
    own = os.dup(2)
    sys.stderr.flush()
    os.dup2(int(given), 2)
    os.close(int(given))
    assert isinstance(sys.stderr, TextIOWrapper)
    sys.stderr = open(own, "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115
