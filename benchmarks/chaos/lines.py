"""What a run must say when a fault has ended it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from benchmarks.chaos.plan import Fault
from benchmarks.chaos.processes import Processes

_ERROR, _KILLED = "lockstep: error: ", r"was killed by SIGKILL; out of memory\?"
_WARNING = "lockstep: warning: "
_STOPPED = "lockstep: stopped by a signal, with a checkpoint"
_FULL = "(the disk is full|No space left on device)"
_UNBEGUN = re.compile(
    r'Traceback \(most recent call last\):\n  File "<string>", line 1, in <module>\n'
    r'(?:  .*\n)*  File ".*/multiprocessing/spawn\.py", line \d+, in _main\n(?:  .*\n)*EOFError: Ran out of input\n'
)
"""What Python prints for a worker whose rank was killed as it started it: before any code of ours runs."""


def expected_line(
    fault: Fault, processes: Processes, victims: Collection[int], run: Path, workers: int | None = None
) -> str | None:
    """The regular expression of the one line by which a run tells a fault; None: nobody is left to say anything.

    Args:
        fault: that ends it.
        processes: of the run, before the fault.
        victims: that get its signal.
        run: the run directory.
        workers: that step a rank's environments, and as many those of its evaluations, which are started later; None:
            nobody knows how many, so that the number of one may be any that it can have.
    """
    if fault.kind == "stop":
        return re.escape(_STOPPED)
    if fault.kind == "disk":
        return rf"{_ERROR}(?=.*{re.escape(str(run))}).*{_FULL}.*"
    if processes.launcher in victims:
        return None
    (victim,) = victims
    if fault.target == "server":  # its ranks die with it
        return rf"{_ERROR}the process that starts the ranks {_KILLED}"
    if fault.target == "rank":
        return rf"{_ERROR}rank {processes.ranks[victim]} {_KILLED}"
    rank, place = processes.place_of(victim)
    number = str(place % workers) if workers else f"({'|'.join(map(str, range(place + 1)))})"
    named = "" if rank is None or len(processes.ranks) == 1 else f"rank {rank}: "
    return rf"{_ERROR}{named}environment \d+ \(.+\), worker process {number}, {_KILLED}"


def problem_of(stderr: str, expected: str | None) -> str | None:
    """Says what is wrong with what a run said, warnings and workers that had not begun aside; None: nothing."""
    stderr = _UNBEGUN.sub("", stderr)
    lines = [line for line in stderr.splitlines() if not line.startswith(_WARNING)]
    if expected is None:
        return f"said by nobody: {stderr[-600:]!r}" if lines else None
    if len(lines) != 1:
        return f"not one line: {stderr[-600:]!r}"
    return None if re.fullmatch(expected, lines[0]) else f"another line than {expected!r}: {lines[0][-600:]!r}"
