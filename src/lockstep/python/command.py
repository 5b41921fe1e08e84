"""Runs a ``lockstep`` command in a separate process; the caller keeps its signals, threads and random state."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from lockstep.core.errors import RunError
from lockstep.core.machine import fix_hashes
from lockstep.core.process import (
    ERROR_PREFIX,
    EXIT_FAILURE,
    EXIT_USER_ERROR,
    command_that_ends_with_us,
    failure_line,
    kill_session,
    say,
)
from lockstep.core.topology import without_launcher
from lockstep.core.user_code.search_path import PATH_VARIABLE

POLL_SECONDS = 0.02
READ_SECONDS = 2.0
"""Seconds to read a command's output after its end; another process may still hold the output open."""
STOPPED = range(129, 160)
"""Exit statuses of a command that a signal stopped."""
KEPT = 1000
"""Number of the last characters of standard error that are kept; a message shows some of them."""
UNTOLD = "the command ended before it was done; it was killed, or an environment or a network has called exit"
NEEDED = ("lockstep", "numpy", "pydantic")
"""Packages that a process imports before it looks at ``LOCKSTEP_PATH``."""


def run_command(
    words: Sequence[str],
    variables: Mapping[str, str],
    quiet: bool = False,
    meanwhile: Callable[[], None] = lambda: time.sleep(POLL_SECONDS),
    break_off: Callable[[BaseException], None] = lambda _: None,
) -> int:
    """Runs ``lockstep WORDS``, shows its output in this process's, and returns 0, or 128 + n if signal n stopped it.

    Ctrl-C is passed on, so that a checkpoint is written, and raised once the command has ended. So is any other
    exception, a signal handler's say; the command is then stopped by SIGTERM. If this process ends unexpectedly, the
    command stops as if by SIGTERM, which also writes a checkpoint.

    Args:
        words: the words of the command line after ``lockstep``.
        variables: environment variables to add to this process's own; modules are also looked for in their
            ``LOCKSTEP_PATH``.
        quiet: whether to drop standard output.
        meanwhile: called again and again until the command ends, or an exception other than the first Ctrl-C.
        break_off: called with that exception and those that follow, because the command may be waiting for what
            ``meanwhile`` does, and would never end.

    Raises:
        ValueError: the command refused its input, or a module that Lockstep is importing calls this; one line.
        RunError: the command failed; the message says why.
        KeyboardInterrupt: the user interrupted.
    """
    if (module := _imported_by_us()) is not None:
        raise ValueError(
            f"{module} starts lockstep {words[0]} while Lockstep imports it, which would begin again without end; put "
            'the call under if __name__ == "__main__":'
        )
    shared = not quiet and _is_terminal(sys.stdout)
    process, status = _started(words, variables, None if shared else subprocess.DEVNULL if quiet else subprocess.PIPE)
    errors, pumps = _Errors(), list[threading.Thread]()
    try:
        pumps.append(_pump(process.stderr, errors.show))
        if process.stdout is not None:
            pumps.append(_pump(process.stdout, lambda line: say(line.removesuffix("\n"), sys.stdout)))
        raised = _wait(process, meanwhile, break_off)
    finally:
        _stop(process)  # if a pump couldn't be started, say
        with status:
            told = status.read(8)
        kill_session(process.pid)  # processes that it has started and left
        for pump in pumps:
            pump.join(READ_SECONDS)
    if raised is not None:
        raise raised
    code = process.returncode or int(told or EXIT_FAILURE)
    if code == 0 or code in STOPPED:
        return code
    untold = not (process.returncode or told or errors.why.startswith(ERROR_PREFIX))
    message = UNTOLD if untold else failure_line(errors.why, code)
    raise ValueError(message) if code == EXIT_USER_ERROR else RunError(message)


def _wait(
    process: subprocess.Popen[str], meanwhile: Callable[[], None], break_off: Callable[[BaseException], None]
) -> BaseException | None:
    """Waits for the end of a command, as :func:`run_command` says; returns the exception to raise then, if any.

    Exceptions of signal handlers come between any two steps, so all of this is in one ``try``.
    """
    raised: list[BaseException] = []
    seen, listens, cancellations = 0, True, _cancellations()
    before = cancellations()
    while True:
        try:
            while seen < len(raised) or process.poll() is None:
                if seen < len(raised):
                    error, seen = raised[seen], seen + 1
                    interrupted = isinstance(error, KeyboardInterrupt)
                    if seen > 1 or not interrupted:
                        listens = False
                        break_off(error)
                    process.send_signal(signal.SIGINT if interrupted else signal.SIGTERM)
                elif cancellations() > before:
                    before = cancellations()
                    raise KeyboardInterrupt
                elif listens:
                    meanwhile()
                else:
                    time.sleep(POLL_SECONDS)
            break
        except BaseException as error:
            raised.append(error)
    return next((error for error in raised if not isinstance(error, KeyboardInterrupt)), raised[0] if raised else None)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stops a command that still runs, as SIGTERM does, and waits for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        time.sleep(POLL_SECONDS)


def _cancellations() -> Callable[[], int]:
    """Returns what counts how often tasks of this thread's event loop have been cancelled; it says 0 if none runs.

    At the first Ctrl-C ``asyncio.run`` cancels its own task, which counts only once that awaits something. It needn't
    be the one that calls this, and no task can cancel another meanwhile.
    """
    if "asyncio" in sys.modules:
        asyncio = sys.modules["asyncio"]
        with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
            tasks = asyncio.all_tasks(asyncio.get_running_loop())
            return lambda: sum(task.cancelling() for task in tasks if hasattr(task, "cancelling"))
    return lambda: 0


def _imported_by_us() -> str | None:
    """Returns the user's module that calls this while Lockstep imports it; None if none does, or only for a callback.

    The command would import the module again, which would start the command again.
    """
    frame, module = sys._getframe(), None
    while frame is not None:
        name, is_module = str(frame.f_globals.get("__name__")), frame.f_code.co_name == "<module>"
        ours = name.partition(".")[0] == "lockstep"
        if is_module and name == "__main__":  # a script's own, or a notebook's
            return None
        if is_module and not ours:
            module = module or name
        elif ours and module is not None:
            return None if name.startswith(f"{__package__}.") else module
        frame = frame.f_back
    return None


def _started(
    words: Sequence[str], variables: Mapping[str, str], stdout: int | None
) -> tuple[subprocess.Popen[str], io.FileIO]:
    """Starts a command; returns its process, and the pipe through which it reports its exit status.

    ``Popen.returncode`` is 0 whatever happened if this process ignores ``SIGCHLD``, or if another thread waits for all
    children.
    """
    environment = {**without_launcher(), **variables}
    environment.pop("PYTHONINSPECT", None)  # the command would look for a user when it is done, and fail
    fix_hashes(environment)
    places = variables.get(PATH_VARIABLE, "").split(os.pathsep)
    before, after = (os.pathsep.join(found) for found in _places([*sys.path, *places]))
    reader, theirs = (_above_standard(number) for number in os.pipe())
    os.set_blocking(reader, False)  # processes that the command started may hold the other end
    status = io.FileIO(reader)
    try:
        process = subprocess.Popen(
            command_that_ends_with_us(*words, asks="lockstep.python.orphaned.end_with_caller", tells=theirs),
            env={**environment, "PYTHONPATH": before, PATH_VARIABLE: after},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # environments print any bytes, and a pipe that isn't read fills up
            start_new_session=True,  # so that Ctrl-C reaches this process alone, which passes it on
            pass_fds=[theirs],
        )
    except BaseException:
        status.close()
        raise
    finally:
        os.close(theirs)
    return process, status


def _above_standard(number: int) -> int:
    """Returns a descriptor above 2 in place of one that is free because this process has closed standard streams.

    The command has its own standard streams there.
    """
    if number > 2:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


def _places(path: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns where a command looks for modules as this process does: before the standard library, and after it.

    ``path`` is like ``sys.path``. The command adds the standard library, the directories of installed packages and the
    working directory itself, and drops from the later directories those that it has already, say by a ``.pth`` file.
    The directories of Lockstep and its imports (:data:`NEEDED`) always come before, because only Lockstep reads those
    after. All directories are absolute.
    """
    standard = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    own = {*sysconfig.get_paths().values(), sysconfig.get_config_var("DESTSHARED"), *standard, *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        own.add(site.getusersitepackages())
    path = [os.path.abspath(place) for place in path if isinstance(place, str) and place]
    first = next((number for number, place in enumerate(path) if place in standard), len(path))
    before, after = (
        [place for place in places if place not in own and os.path.exists(place)]
        for places in (path[:first], path[first:])
    )
    files = [str(sys.modules[name].__file__) for name in NEEDED if name in sys.modules]
    needed = dict.fromkeys(os.path.abspath(Path(file).parents[1]) for file in files)
    return before + [place for place in needed if place in after and place not in before], after


def _is_terminal(stream: IO[str]) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.fileno() == 1 and stream.isatty()
    return False


class _Errors:
    """Shows what a command prints to standard error, and keeps the part that may say why the command fails.

    Attributes:
        why: the last error line; without one, the end of the output.
    """

    def __init__(self) -> None:
        self.why, self._said = "", False

    def show(self, line: str) -> None:
        """Shows a line, unless it is an error line, which is raised instead."""
        if line.startswith(ERROR_PREFIX):
            self.why, self._said = line, True
            return
        if not self._said:
            self.why = (self.why + line)[-KEPT:]
        say(line.removesuffix("\n"))


def _pump(stream: IO[str] | None, show: Callable[[str], None]) -> threading.Thread:
    assert stream is not None

    def read() -> None:
        with stream:
            for line in stream:
                # Our stream may be closed, or replaced by the caller's own; the command blocks if its pipe isn't read.
                with contextlib.suppress(Exception):
                    show(line)

    thread = threading.Thread(target=read, name="lockstep-output", daemon=True)
    thread.start()
    return thread
