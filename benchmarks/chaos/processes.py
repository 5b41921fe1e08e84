"""Finds the processes of a run by a variable that all of them inherit, and signals them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "LOCKSTEP_CHAOS_MARK"


def marked(mark: str) -> dict[int, str]:
    """The processes, alive, that carry a mark: names by process id."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "comm").read_text().rstrip("\n")
    return found


def parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def roles(mark: str, launcher: int) -> dict[str, list[int]]:
    """The processes of a run by what they are: launcher, server, ranks, workers; a lone launcher is its rank.

    Args:
        mark: that they carry.
        launcher: process id of the command itself.
    """
    names, parent_of = marked(mark), parents()
    ranks = sorted(pid for pid, name in names.items() if name.startswith("lockstep rank"))
    known = {launcher, *ranks, *(pid for pid, name in names.items() if name == "lockstep server")}
    trainers = set(ranks) or {launcher}
    return {
        "launcher": [launcher],
        "server": sorted(known - {launcher, *ranks}),
        "rank": sorted(trainers),
        "worker": sorted(pid for pid in names if parent_of.get(pid) in trainers and pid not in known and _is_ours(pid)),
        "everything": sorted(names, key=lambda pid: (pid != launcher, pid)),
    }


def _is_ours(pid: int) -> bool:
    """Tells a worker from Python's own helper, which cleans up after those that forgot to."""
    with suppress(OSError):
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signals processes; those that are gone need none."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
