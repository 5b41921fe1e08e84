"""What a command does whose caller, a Python process, has ended without a word: it stops with a checkpoint, in time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Sequence

from lockstep.core.process import end_with_parent, kill_children, kill_session

CALLER_ENDED = signal.SIGUSR2
"""What the kernel sends then (Linux): before the next word to a terminal that is closed, if it can be."""
LOOK_SECONDS = 0.2
"""How often a command looks whether its caller is there."""
PATIENCE = 600.0
"""Seconds that the iteration may take yet, with its checkpoint: one that hangs would keep the run for ever."""
_OUTPUT = (1, 2)
_PART = 1 << 16


def end_with_caller(caller: int) -> None:
    """Stops this process's command by SIGTERM when its caller, this process id, ends.

    What it prints then, its ranks and what they have started, is read here, and dropped (Linux): whoever prints into a
    pipe that nobody can read any more fails. A thread looks besides, for the main thread may compute, or wait for a
    rank that prints.
    """
    readers = _own_readers()  # before the caller may be gone
    # Anybody may send this signal: a scheduler before a job's end does.
    signal.signal(CALLER_ENDED, lambda _number, _frame: os.getppid() != caller and _print_nowhere())
    end_with_parent(caller, CALLER_ENDED)
    threading.Thread(target=_watch, args=(caller, readers), name="lockstep-caller", daemon=True).start()


def _own_readers() -> list[int]:
    """Opens the reading ends of the pipes that this process prints to, for itself alone."""
    readers = []
    for stream in _OUTPUT:
        with contextlib.suppress(OSError):  # it is closed, or there is no /proc
            if stat.S_ISFIFO(os.fstat(stream).st_mode):
                readers.append(os.open(f"/proc/self/fd/{stream}", os.O_RDONLY | os.O_NONBLOCK))

    def forget() -> None:  # once: a child's children inherit it too, for whom the numbers are other files
        while readers:
            os.close(readers.pop())

    os.register_at_fork(after_in_child=forget)
    return readers


def _print_nowhere() -> None:
    with contextlib.suppress(OSError):  # what isn't a pipe, a terminal that is closed, say
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in _OUTPUT:
            os.dup2(nowhere, stream)
        os.close(nowhere)


def _watch(caller: int, readers: Sequence[int]) -> None:
    while os.getppid() == caller:
        time.sleep(LOOK_SECONDS)
    _print_nowhere()
    os.kill(os.getpid(), signal.SIGTERM)
    _drop(readers, time.monotonic() + PATIENCE)
    kill_children()
    kill_session(os.getpid())


def _drop(readers: Sequence[int], until: float) -> None:
    """Reads pipes, and keeps nothing, for so long."""
    left = list(readers)
    while (seconds := until - time.monotonic()) > 0:
        if not left:
            time.sleep(seconds)
        for reader in select.select(left, [], [], seconds)[0] if left else ():
            with contextlib.suppress(BlockingIOError):  # two of one pipe
                if not os.read(reader, _PART):  # nobody prints there any more
                    left.remove(reader)
