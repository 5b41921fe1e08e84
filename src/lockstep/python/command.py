"""Runs a ``lockstep`` command in a process of its own: whoever calls it keeps its signals, threads and random state."""

from __future__ import annotations

import contextlib
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
from lockstep.core.process import (
    ERROR_PREFIX,
    EXIT_FAILURE,
    EXIT_USER_ERROR,
    PATH_VARIABLE,
    command_that_ends_with_us,
    kill_session,
    said_error,
    say,
)
from lockstep.core.topology import without_launcher

POLL_SECONDS = 0.02
READ_SECONDS = 2.0
"""How long what a command has printed may take to be read, once it has ended and somebody else may hold its output."""
STOPPED = range(129, 160)
"""Exit statuses of a command that a signal stopped."""
KEPT = 1000
"""Characters of standard error that are kept, of which a message shows some."""
UNTOLD = "the command ended before it was done; it was killed, or an environment or a network has called exit"
NEEDED = ("lockstep", "numpy", "pydantic")
"""What processes import that look at ``LOCKSTEP_PATH`` then."""


def run_command(
    words: Sequence[str],
    variables: Mapping[str, str],
    quiet: bool = False,
    meanwhile: Callable[[], None] = lambda: time.sleep(POLL_SECONDS),
) -> int:
    """Runs ``lockstep WORDS``, and shows what it prints where this process prints; returns 0, or 128 + n of a signal.

    Ctrl-C is passed on, so that a checkpoint is written, and raised once the command has ended. Where this process ends
    without a word, the command stops as by SIGTERM, and so writes one as well.

    Args:
        words: the command line.
        variables: environment variables beside this process's own; modules are also looked for in ``LOCKSTEP_PATH``.
        quiet: whether to keep what goes to standard output.
        meanwhile: is called again and again until the command ends.

    Raises:
        ValueError: the command refused its input, or is started by a module that we import; one line.
        RunError: it failed; its line.
        KeyboardInterrupt: the user interrupted.
    """
    if (module := _imported_by_us()) is not None:
        raise ValueError(
            f"{module} starts lockstep {words[0]} while Lockstep imports it, which would begin again without end; put "
            'the call under if __name__ == "__main__":'
        )
    shared = not quiet and _is_terminal(sys.stdout)
    process, status = _started(words, variables, None if shared else subprocess.DEVNULL if quiet else subprocess.PIPE)
    errors = _Errors()
    pumps = [_pump(process.stderr, errors.show)]
    if process.stdout is not None:
        pumps.append(_pump(process.stdout, lambda line: say(line.removesuffix("\n"), sys.stdout)))
    interrupted = False
    try:
        while process.poll() is None:
            try:
                meanwhile()
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:  # ``meanwhile`` raised
            process.send_signal(signal.SIGTERM)
            process.wait()
        with status:
            told = status.read(8)
        kill_session(process.pid)  # what it has started, and left
        for pump in pumps:
            pump.join(READ_SECONDS)
    if interrupted:
        raise KeyboardInterrupt
    code = process.returncode or int(told or EXIT_FAILURE)
    if code == 0 or code in STOPPED:
        return code
    untold = not (process.returncode or told or errors.why.startswith(ERROR_PREFIX))
    message = UNTOLD if untold else said_error(errors.why, code)
    raise ValueError(message) if code == EXIT_USER_ERROR else RunError(message)


def _imported_by_us() -> str | None:
    """The user's module in whose import this is called, where Lockstep imports it; None: it isn't, or a callback does.

    The command would import it once more.
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
    """Starts a command; returns it, and where it tells its exit status at its end.

    The process's own can't be had where this one ignores ``SIGCHLD``, or another thread waits for all children: Python
    says 0 then.
    """
    places = variables.get(PATH_VARIABLE, "").split(os.pathsep)
    before, after = (os.pathsep.join(found) for found in _places([*sys.path, *places]))
    reader, theirs = os.pipe()
    os.set_blocking(reader, False)  # what the command has started may hold the other end
    status = io.FileIO(reader)
    try:
        process = subprocess.Popen(
            command_that_ends_with_us(*words, asks="lockstep.python.orphaned.end_with_caller", tells=theirs),
            env={**without_launcher(), **variables, "PYTHONPATH": before, PATH_VARIABLE: after},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # of what an environment prints, which a full pipe would stop
            start_new_session=True,  # Ctrl-C is this process's to pass on
            pass_fds=[theirs],
        )
    except BaseException:
        status.close()
        raise
    finally:
        os.close(theirs)
    return process, status


def _places(path: Sequence[str]) -> tuple[list[str], list[str]]:
    """Where this process finds modules, for the other one: what it looks at before the standard library, and after it.

    ``path`` is ``sys.path``. The other process looks at the standard library, directories of installed packages and the
    working directory by itself; of what comes after it drops what it has there, as by a ``.pth`` file. Where we lie,
    and what we import, comes before in any case, for nobody reads the rest without us. All are absolute.
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
    """Shows what a command prints to standard error, and keeps of it what may say why it fails.

    Attributes:
        why: its last line that says so, else the end of all that it printed.
    """

    def __init__(self) -> None:
        self.why, self._said = "", False

    def show(self, line: str) -> None:
        """Shows a line, unless it is why the command fails, which is raised."""
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
                # Of a stream that is closed here, or the caller's own in its place: who prints must be read on.
                with contextlib.suppress(Exception):
                    show(line)

    thread = threading.Thread(target=read, name="lockstep-output", daemon=True)
    thread.start()
    return thread
