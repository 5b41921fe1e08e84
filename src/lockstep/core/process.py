"""How a process of the run ends: with its parent, on a signal, or with one line that says why."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from lockstep.core.topology import error_file, started_by_lockstep

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1
ERROR_PREFIX = "lockstep: error: "


def end_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a closed pipe must do).

    Args:
        parent: its process id, if known: one that died before we could ask is noticed then.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_FAILURE)


def command_that_ends_with_us(*words: str) -> list[str]:
    """The command line of ``lockstep WORDS`` in a process that ends when this one does, see :func:`end_with_parent`.

    It asks for that by itself, for ``preexec_fn`` runs between fork and exec, where a lock that one of JAX's threads
    held at the fork is never released.
    """
    begin = f"from lockstep.core.process import end_with_parent; end_with_parent({os.getpid()})"
    return [sys.executable, "-c", f"import sys; {begin}; from lockstep.cli import main; sys.exit(main())", *words]


def report_failure(message: str, *, secondary: bool = False) -> None:
    """Say why this rank fails: to the launcher if there is one that listens, else on standard error.

    Args:
        message: one line, or a traceback where the program itself is at fault.
        secondary: this rank fails only because another one did, or another one says it; shown last or not at all.
    """
    path = error_file()
    if path is not None:
        extra = {"timestamp": str(int(time.time())), "secondary": secondary}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if path is None or not (secondary or started_by_lockstep()):
        print(f"{ERROR_PREFIX}{message}", file=sys.stderr, flush=True)


def read_failure(path: str | None) -> tuple[str, bool] | None:
    """What :func:`report_failure` wrote: the message and whether it is secondary; None if there is nothing."""
    try:
        content: Any = json.loads(Path(path or "").read_text())
    except (OSError, ValueError):
        return None
    message = content.get("message", content)
    if isinstance(message, dict):
        return str(message.get("message", "")), bool(message.get("extraInfo", {}).get("secondary", False))
    return str(message), False


def said_error(stderr: str, code: int) -> str:
    """Why a ``lockstep`` command failed, from its standard error and exit status, in one line where it said one."""
    said = [line for line in stderr.splitlines() if line.startswith(ERROR_PREFIX)]
    return (said[-1].removeprefix(ERROR_PREFIX) if said else stderr.strip()[-500:]) or f"exit status {code}"


def fail_now(message: str) -> NoReturn:
    """Report and end this process at once, from any thread, whatever the main thread is stuck in."""
    report_failure(message)
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)
