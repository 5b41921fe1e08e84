"""Starts child processes for the server of ranks: forks, and fresh Python processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lockstep.core.process import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    PARENT_VARIABLE,
    STOP_SIGNALS,
    end_with_parent,
    flush_output,
    say,
    stop_signals,
)


def fork(body: Callable[[], int]) -> int:
    """Forks a child that runs ``body`` and exits with the code that it returns; returns the child's process id.

    The child leads a new session, dies with this process, reads nothing from standard input, and has the default signal
    handlers. Stop signals are blocked until it has them.
    """
    parent = os.getpid()
    flush_output()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _leave(lambda: _begin(parent) or body())
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _begin(parent: int) -> int:
    os.setsid()
    end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *stop_signals()):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a fresh process; otherwise all ranks draw the same numbers
    return 0


def _leave(body: Callable[[], int]) -> NoReturn:
    """Ends this forked process with the code that ``body`` returns, and skips the server's exit handlers."""
    code = EXIT_FAILURE
    try:
        code = body()
    except SystemExit as error:
        if isinstance(error.code, str):
            say(error.code)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def spawn(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: int | None, passed: Sequence[int] = ()
) -> int:
    """Starts ``python ARGUMENTS`` in a new session, with the descriptors ``passed``; returns its process id."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**environment, PARENT_VARIABLE: str(os.getpid())},
        stdin=stdin,
        pass_fds=passed,
        start_new_session=True,
    )
    process.returncode = 0  # the server collects it itself
    return process.pid


def one_thread() -> bool:
    """Tells whether this process has only one thread, so that a fork loses none; False if that isn't known."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1
