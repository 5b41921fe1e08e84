"""The ``lockstep`` command: runs the module of a subcommand and turns errors into one line and an exit code."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from lockstep import __version__
from lockstep.core.errors import RunError, one_line
from lockstep.core.machine import begin_with_fixed_hashes, fix_hashes, fix_mkl_mode
from lockstep.core.process import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    STOP_SIGNALS,
    flush_output,
    heed_signals,
    interrupted_at_once,
    leave_at_once,
    open_closed_streams,
    report_failure,
    say,
)
from lockstep.core.topology import Topology, from_environment
from lockstep.core.user_code.search_path import search_working_directory_last

USAGE = """\
usage: lockstep COMMAND ...

Train one reinforcement-learning agent on many devices: the same bytes on 1 process or 64.

  lockstep train CartPole-v1                    train by the environment's preset
  lockstep train config.yaml --nproc 4          the same run on four ranks
  lockstep check CartPole-v1                    whether an environment is fit for training
  lockstep train --resume runs/NAME             continue, on any number of ranks
  lockstep list                                 the runs there are, and what came of them
  lockstep plot RUN RUN --out curves.png        their learning curves
  lockstep report RUN --out report.html         one page about a run, or about several
  lockstep eval RUN --episodes 20               returns of the trained policy
  lockstep play RUN --video out.mp4             watch it
  lockstep compare RUN RUN                      which of them plays better, and how sure that is
  lockstep record RUN --out episodes.npz        its episodes, for lockstep clone episodes.npz --out RUN
  lockstep export RUN --onnx policy.onnx        the policy for other programs; --torch policy.pt2
  lockstep verify CartPole-v1 --world-sizes 1,2,4   whether their first iterations have the same bytes
  lockstep bench CartPole-v1 --world-sizes 1,2      how fast more ranks are, and where the time goes
  lockstep plan CartPole-v1 --on h100:8             what a run takes on devices that you don't have yet
  lockstep run --nproc 4 script.py ARGS         four ranks of your own script, with torchrun's variables
  lockstep doctor --nproc 2 -- script.py ARGS   whether the ranks of a PyTorch script are one agent; cause and fix

lockstep COMMAND --help lists every option; lockstep --version prints the version."""

COMMANDS = (
    *("train", "check", "list", "plot", "report", "eval", "play", "compare", "record", "clone", "export"),
    *("verify", "bench", "plan", "run", "doctor"),
)
"""Modules of ``lockstep.commands``, loaded only when called; ``main(argv)`` of each returns the exit status."""

NAMES_ELSEWHERE = {
    **{word: "train" for word in ("learn", "fit", "ppo", "grpo")},
    **{word: "train --resume RUN" for word in ("resume", "continue")},
    **{word: "play RUN" for word in ("enjoy", "watch", "render", "visualize")},
    **{word: "eval RUN" for word in ("evaluate", "test")},
    **{word: "bench" for word in ("benchmark", "profile")},
    **{word: "list" for word in ("ls", "runs", "status")},
}
"""Command names of other libraries, with the command that does the same here."""


STARTING_WORK = ("train", "verify", "bench", "run", "doctor")
"""Commands whose exit status reports on the work they started; others exit with 0 if their output pipe is closed."""


RUNNING_SCRIPTS = ("run", "doctor")
"""Commands whose ranks are a user's own program, whose numerics we must not change."""


THREADS_SECONDS = 30.0
"""Seconds for which the end of a command waits for threads that aren't daemons."""


STEPPING = ("train", "check", "eval", "play", "compare", "record", "clone", "verify", "bench", "plan")
"""Commands that step environments, in this process or in those that it starts."""


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"lockstep {__version__}")
        return 0
    search_working_directory_last()
    name = words[0]
    if name not in RUNNING_SCRIPTS:
        fix_mkl_mode()
        fix_hashes(os.environ)  # of the processes that this one starts
    if name not in COMMANDS:
        close = [NAMES_ELSEWHERE[name]] if name in NAMES_ELSEWHERE else difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        raise ValueError(f"{name!r} is no command; {hint}")
    return importlib.import_module(f"lockstep.commands.{name}").main(words[1:])


def _topology() -> Topology:
    """Returns this process's place in the run, or a single rank if the launcher's variables are invalid."""
    try:
        return from_environment()
    except ValueError:
        return Topology()


@contextlib.contextmanager
def _ended_by_signals(called: bool) -> Iterator[None]:
    """Makes stop signals end this process if it is the first of a container, which the kernel shields from them.

    Code that handles these signals for ranks or checkpoints installs its own handlers later. The default handlers are
    restored at the end if ``called`` from Python.
    """
    first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
    taken = [number for number in STOP_SIGNALS if first and signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, lambda number, _frame: os._exit(128 + number))
    try:
        yield
    finally:
        for number in taken if called else ():  # not for a command, whose exit may take long
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _showing_every_sign() -> Iterator[None]:
    """Escapes characters that standard output can't encode (``…`` in Latin-1), where a command would otherwise fail."""
    out, before = sys.stdout, None
    with contextlib.suppress(OSError, ValueError):  # the stream is closed
        if isinstance(out, io.TextIOWrapper) and _may_lack_signs(out):
            before = out.errors
            out.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if before is not None and isinstance(out, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                out.reconfigure(errors=before)


def _may_lack_signs(out: io.TextIOWrapper) -> bool:
    if out.errors == "surrogateescape":  # set by the C locale; in UTF-8 it passes file names that aren't valid UTF-8
        return codecs.lookup(out.encoding).name != "utf-8"
    return out.errors == "strict"


def command() -> int:
    """Runs this process's command line as :func:`main` does, with the same hashes of texts in every process."""
    steps = len(sys.argv) > 1 and sys.argv[1] in STEPPING
    if steps:
        begin_with_fixed_hashes()
    code = main()
    if steps:
        threading.Thread(target=_end_despite_threads, args=(code,), name="lockstep-end", daemon=True).start()
    return code


def _end_despite_threads(code: int) -> None:
    """Ends this process in a while, if threads that nobody ends, say an environment's, keep it alive.

    Python waits for all threads but daemons, before it does what libraries want at exit.
    """
    time.sleep(THREADS_SECONDS)
    left = [each.name for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    if left:
        what = f"lockstep: ended, though thread {left[0]} still runs"
        say(f"{what}; whoever starts it should make it a daemon, or end it: an environment in its close")
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        leave_at_once(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 1 (failed), 2 (bad input), 128 + n (stopped by signal n)."""
    open_closed_streams()
    if argv is None:
        heed_signals()
    with _showing_every_sign(), _ended_by_signals(argv is not None):
        code = _main(list(sys.argv[1:] if argv is None else argv))
    if argv is None and interrupted_at_once.is_set():
        atexit.register(leave_at_once, code)  # runs before what libraries have registered
    return code


def _main(words: list[str]) -> int:
    works = bool(words) and words[0] in STARTING_WORK
    try:
        code = _run(words)
        if not works:
            sys.stdout.flush()
        return code
    except ValueError as error:
        report_failure(one_line(error), secondary=_topology().local_rank > 0)
        return EXIT_USER_ERROR
    except (RunError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not works:  # the reader of our output has exited (`| head`)
            return 0
        report_failure(one_line(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        report_failure("interrupted")
        return EXIT_INTERRUPTED
    finally:
        flush_output()
