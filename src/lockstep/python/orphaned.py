"""Stops a command with a checkpoint if the Python process that called it ends unexpectedly."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Sequence

from lockstep.core.process import end_with_parent, heed_signals, kill_children, kill_session

CALLER_ENDED = signal.SIGUSR2
"""The kernel sends it when the caller ends (Linux), if possible before the command prints to a closed terminal."""
LOOK_SECONDS = 0.2
"""Seconds between two checks that the caller is still there."""
PATIENCE = 600.0
"""Seconds to finish the iteration and write the checkpoint; a command that hangs would hold the run for ever."""
_OUTPUT = (1, 2)
_PART = 1 << 16


def end_with_caller(caller: int) -> None:
    """Stops this process's command by SIGTERM when the process ``caller`` ends; kills it after :data:`PATIENCE`.

    Output of this process, its ranks and their children is then read here and dropped (Linux), because printing into a
    pipe without a reader fails. A thread watches the caller, because the main thread may be computing, or waiting for a
    rank that prints.
    """
    readers = _own_readers()  # before the caller can be gone
    # Others may send this signal too: a scheduler does before a job ends.
    signal.signal(CALLER_ENDED, lambda _number, _frame: os.getppid() != caller and _print_nowhere())
    heed_signals(CALLER_ENDED)
    end_with_parent(caller, CALLER_ENDED)
    threading.Thread(target=_watch, args=(caller, readers), name="lockstep-caller", daemon=True).start()


def _own_readers() -> list[int]:
    """Opens the reading ends of the pipes that this process prints to; forked children close them."""
    readers = []
    for stream in _OUTPUT:
        with contextlib.suppress(OSError):  # the stream is closed, or there is no /proc
            if stat.S_ISFIFO(os.fstat(stream).st_mode):
                readers.append(os.open(f"/proc/self/fd/{stream}", os.O_RDONLY | os.O_NONBLOCK))

    def forget() -> None:  # a grandchild calls it too; by then other files may have the numbers
        while readers:
            os.close(readers.pop())

    os.register_at_fork(after_in_child=forget)
    return readers


def _print_nowhere() -> None:
    # _drop reads only pipes; printing to a closed terminal, say, would fail
    with contextlib.suppress(OSError):
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
    """Reads pipes and drops what it reads; returns at the monotonic time ``until``."""
    left = list(readers)
    while (seconds := until - time.monotonic()) > 0:
        if not left:
            time.sleep(seconds)
        for reader in select.select(left, [], [], seconds)[0] if left else ():
            with contextlib.suppress(BlockingIOError):  # two descriptors of one pipe
                if not os.read(reader, _PART):  # no process can write to it any more
                    left.remove(reader)
