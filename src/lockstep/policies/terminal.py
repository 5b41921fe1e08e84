"""Shows texts in a terminal, each in place of the one before, until a key ends it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from typing import Any

try:
    import termios
    import tty
except ImportError:  # on Windows only Ctrl-C ends it
    termios = tty = None

CLEAR = "\x1b[H\x1b[J"
"""Moves a terminal's cursor to the upper left corner and clears everything below."""
HINT = "the policy plays, keys don't steer; {} ends it"
QUIT_KEYS = b"qQ\x04"
"""q and Ctrl-D."""


class QuitPlay(Exception):  # noqa: N818 (no error)
    """The viewer ended the play."""


class Terminal:
    """Shows ``fps`` texts a second, each in place of the one before; without a terminal it prints them all at once.

    Keys are read if input comes from a terminal in whose foreground this process runs; :meth:`close` restores it.
    """

    def __init__(self, fps: int) -> None:
        self._pause = 1 / fps if sys.stdout.isatty() else 0.0
        self._input, self._before = -1, None
        if self._pause:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, no file or no termios
                self._read_keys(sys.stdin.fileno())

    def _read_keys(self, descriptor: int) -> None:
        """Reads single keys without echo; Ctrl-C stays a signal."""
        if termios is not None and tty is not None and os.tcgetpgrp(descriptor) == os.getpgrp():
            self._before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)
            self._input = descriptor

    def append_data(self, text: str) -> None:
        """Shows one text.

        Raises:
            QuitPlay: q was pressed.
        """
        if not self._pause:
            print(text, flush=True)
            return
        way_out = HINT.format("Ctrl-C" if self._before is None else "q or Ctrl-C")
        print(f"{CLEAR}{text}\n{way_out}", flush=True)
        if self._before is None:
            time.sleep(self._pause)
        elif self._quits():
            raise QuitPlay

    def _quits(self) -> bool:
        """Waits until the next text is due; returns whether a key that ends the play was pressed."""
        until = time.monotonic() + self._pause
        while (left := until - time.monotonic()) > 0:
            if select.select([self._input], [], [], left)[0]:
                key = os.read(self._input, 1)
                if not key or key in QUIT_KEYS:
                    return True
        return False

    def close(self) -> None:
        """Restores the terminal's settings."""
        if termios is not None and self._before is not None:
            before: Any = self._before
            self._before = None
            termios.tcsetattr(self._input, termios.TCSADRAIN, before)
