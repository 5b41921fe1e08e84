"""What a command does whose caller, a Python process, has ended without a word: it stops with a checkpoint, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from lockstep.core.process import end_with_parent, kill_children, kill_session

CALLER_ENDED = signal.SIGUSR2
"""What the kernel sends then, for a stop signal alone doesn't tell why."""
PATIENCE = 600.0
"""Seconds that the iteration may take yet, with its checkpoint: one that hangs would keep the run for ever."""


def end_with_caller(caller: int) -> None:
    """Stops this process's command by SIGTERM when its caller, this process id, ends (Linux)."""
    signal.signal(CALLER_ENDED, _stop)
    end_with_parent(caller, CALLER_ENDED)


def _stop(_number: int, _frame: object) -> None:
    with contextlib.suppress(OSError):  # nobody reads on, and who prints would fail of it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
    threading.Thread(target=_give_up, name="lockstep-orphaned", daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _give_up() -> None:
    time.sleep(PATIENCE)
    kill_children()
    kill_session(os.getpid())
