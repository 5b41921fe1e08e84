"""How a process of a run ends: with its parent, on a signal, or after one line that says why."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lockstep.core.topology import error_file, started_by_lockstep

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT
ERROR_PREFIX = "lockstep: error: "
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to end: from a scheduler, from a user, or from a terminal that closes."""
UNDONE = "ended with exit code 0 before the run was done; an environment or a network may have called exit"

PARENT_VARIABLE = "LOCKSTEP_PARENT"
"""Holds, for a process that we start, the process id of its parent."""
at_failure: list[Callable[[], None]] = []
"""Short clean-ups that :func:`fail_now` runs before it ends the process."""
interrupted_at_once = threading.Event()
"""Is set where a second Ctrl-C has left compilations of XLA under way, whose threads crash in libraries' clean-ups."""
started_by_command = threading.Event()
"""Is set in a command that another of our processes started, which passes on signals that this one may get as well."""
REPEAT_SECONDS = 0.5
"""Seconds within which a second Ctrl-C may be the first one, passed on."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_PARENT, _SESSION = 1, 3


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent dies (Linux; elsewhere a closed pipe has to do).

    Args:
        parent: process id of the parent, told by the parent itself, so that a death before this call is noticed. None:
            taken from ``LOCKSTEP_PARENT``, which is for this process alone and is removed from its environment.
        number: the signal.
    """
    told = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None and told is not None:
        parent = int(told)
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_FAILURE)


def started_at(pid: int) -> str:
    """Reads when a process was started, in the kernel's ticks, because ids are reused; "" if it can't be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def open_closed_streams() -> None:
    """Opens ``/dev/null`` as each of standard input, output and error that this process was started without.

    Otherwise the next file to be opened would get the number of the missing stream, and printing would fail.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free number: this one
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line at once; does nothing if the stream can't be written any more.

    ``stream``: None is standard error.
    """
    out = sys.stderr if stream is None else stream
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text, file=out, flush=True)
        except UnicodeEncodeError as error:  # the terminal's encoding lacks a character
            print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), file=out, flush=True)


def flush_output() -> None:
    """Flushes standard output and error, and redirects to ``/dev/null`` those that can't be written any more.

    Python flushes both once more when it ends, and would otherwise fail there.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def enable_fault_handler() -> None:
    """Prints the Python stack on standard error if a segmentation fault or the like ends this process."""
    if faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard error, or no file
        faulthandler.enable(all_threads=False)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies (Linux), so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask for an end, without SIGHUP if it is ignored (``nohup``)."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def heed_signals(*others: signal.Signals) -> None:
    """Unblocks stop signals and ``others``, and stops ignoring SIGCHLD: a process inherits both from its caller.

    ``Popen`` says 0 for every child's exit status if SIGCHLD is ignored.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, *others})
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def is_passed_on(first: float) -> bool:
    """Tells whether a second Ctrl-C may be the one of the monotonic time ``first``, which our caller passes on."""
    return started_by_command.is_set() and time.monotonic() - first < REPEAT_SECONDS


@contextlib.contextmanager
def handling_stop_signals(handler: Any) -> Iterator[None]:
    """Handles stop signals by ``handler`` in the block, and then as before; in the main thread alone."""
    previous = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)  # None: it was set by a C library


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """Lets stop signals end this process at once in a block, in which no work can be lost."""
    in_main = threading.current_thread() is threading.main_thread()
    return handling_stop_signals(signal.SIG_DFL) if in_main else contextlib.nullcontext()


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Turns ``os._exit(0)`` in this process, which an environment may call, into a failure with a message."""
    original, own = os._exit, os.getpid()

    def leave(code: int) -> NoReturn:
        if code == 0 and os.getpid() == own:
            report_failure(f"this process {UNDONE}")
            flush_output()
            code = EXIT_FAILURE
        original(code)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = original


def signal_name(number: int) -> str:
    """Returns a signal's name, such as ``SIGKILL`` for 9, or "signal N" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def killed_by(number: int) -> str:
    """Says that a signal ended a process, and why it may have been sent."""
    name = signal_name(number)
    return f"was killed by {name}{'; out of memory?' if name == 'SIGKILL' else ''}"


def name_process(name: str) -> None:
    """Sets the name, of at most 15 characters, that ``ps`` and ``top`` show for this process (Linux)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _processes(field: int) -> dict[int, int]:
    """Reads a field of ``/proc/PID/stat`` (1: parent, 3: session) by process id; empty without ``/proc``."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[field])
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kills every process of the session that ``leader`` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid, session in _processes(_SESSION).items():
        if session == leader:
            _kill(pid)


_others: dict[int, str] = {}
"""Children that this process had from the start, with their start times: those of a shell that it replaced, say."""


def exempt_present_children() -> None:
    """Records the current children of this process as not ours, so that :func:`kill_children` spares them."""
    own = os.getpid()
    _others.update({pid: started_at(pid) for pid, parent in _processes(_PARENT).items() if parent == own})


def kill_children() -> None:
    """Kills this process's children, including orphans it adopts meanwhile, until only the spared ones are left."""
    own = os.getpid()
    spared = {pid for pid, begun in _others.items() if started_at(pid) == begun}
    while children := [pid for pid, parent in _processes(_PARENT).items() if parent == own and pid not in spared]:
        for pid in children:
            _kill(pid)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def command_that_ends_with_us(
    *words: str, asks: str = "lockstep.core.process.end_with_parent", tells: int | None = None
) -> list[str]:
    """Returns the command line of ``lockstep WORDS`` in a process that ends with this one, see :func:`end_with_parent`.

    The new process makes that request itself: ``preexec_fn`` runs between fork and exec, where a lock that one of JAX's
    threads held at the fork is never released. ``asks`` names the function that makes it, called with our process id.
    At its end the process writes its exit status to the inherited file descriptor ``tells``, if there is one.
    """
    module, _, function = asks.rpartition(".")
    begin = f"from {module} import {function}; {function}({os.getpid()})"
    tell = "" if tells is None else f"import os; os.write({tells}, str(code).encode()); "
    code = f"import sys; {begin}; from lockstep.cli import main; code = main(); {tell}sys.exit(code)"
    return [sys.executable, "-P", "-c", code, *words]


def report_failure(message: str, *, secondary: bool = False) -> None:
    """Says why this rank fails, in a line or a traceback: to the launcher if it listens, else on standard error.

    It is ``secondary`` if another rank failed first or reports the same; that is shown last or not at all.
    """
    path, message = error_file(), "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message)
    if path is not None and not write_failure(path, message, secondary):
        path = None
    if path is None or not (secondary or started_by_lockstep()):
        say(f"{ERROR_PREFIX}{message}")


def write_failure(path: Path, message: str, secondary: bool) -> bool:
    """Writes a failure for :func:`read_failure`, and returns whether it could be written."""
    extra = {"timestamp": str(int(time.time())), "secondary": secondary}
    try:
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    except OSError:  # the disk is full, or the directory is gone
        return False
    return True


def read_failure(path: str | None) -> tuple[str, bool] | None:
    """Reads what :func:`report_failure` wrote: the message and whether it is secondary; None if there is nothing."""
    try:
        return failure_in(Path(path or "").read_text())
    except (OSError, ValueError):
        return None


def failure_in(text: str) -> tuple[str, bool] | None:
    """Parses the text of a file that :func:`report_failure` wrote, as :func:`read_failure` does."""
    try:
        content: Any = json.loads(text)
    except ValueError:
        return None
    message = content.get("message", content)
    if isinstance(message, dict):
        return str(message.get("message", "")), bool(message.get("extraInfo", {}).get("secondary", False))
    return str(message), False


def failure_line(stderr: str, code: int) -> str:
    """Returns why a ``lockstep`` command failed: its last error line, else the end of ``stderr``, or how it ended."""
    said = [line for line in stderr.splitlines() if line.startswith(ERROR_PREFIX)]
    how = killed_by(-code) if code < 0 else f"exit status {code}"
    end = "" if code == -signal.SIGKILL else stderr.strip()[-500:]  # what it said before isn't why it was killed
    return (said[-1].removeprefix(ERROR_PREFIX) if said else end) or how


def show_cursor() -> None:
    """Shows the terminal's cursor again, which the live bar of a process that was killed may have hidden."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # standard output may be closed, or there is none
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without running what libraries do at exit."""
    flush_output()
    os._exit(code)


def fail_now(message: str, secondary: bool = False, code: int = EXIT_FAILURE) -> NoReturn:
    """Reports a failure and ends this process at once, from any thread, even if the main thread is stuck."""
    try:
        report_failure(message, secondary=secondary)
        show_cursor()
        for tidy in at_failure:
            with contextlib.suppress(Exception):
                tidy()
        sys.stderr.flush()
    finally:  # even if nothing can be written any more
        os._exit(code)
