"""Finds the processes of a run by a variable that all of them inherit, and signals them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.process import started_at

MARK = "LOCKSTEP_CHAOS_MARK"
RANK, SERVER = "lockstep rank ", "lockstep server"


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


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as they were when they were looked at.

    Attributes:
        launcher: process id of the command itself; without ranks of other processes it is the rank.
        ranks: number of each rank, by process id; empty where the launcher is the only one.
        server: process ids of what starts ranks.
        workers: process ids of each rank's workers in the order of their start, by the rank's process id.
        others: that carry the mark besides.
    """

    launcher: int
    ranks: Mapping[int, int]
    server: tuple[int, ...] = ()
    workers: Mapping[int, tuple[int, ...]] | None = None
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, mark: str, launcher: int) -> Processes:
        """Looks at the processes that carry a mark."""
        names, parent_of = marked(mark), parents()
        ranks = {pid: int(name.removeprefix(RANK)) for pid, name in names.items() if name.startswith(RANK)}
        server = tuple(sorted(pid for pid, name in names.items() if name == SERVER and pid != launcher))
        known = {launcher, *ranks, *server}
        workers: dict[int, tuple[int, ...]] = {}
        for trainer in ranks or (launcher,):
            children = [pid for pid in names if parent_of.get(pid) == trainer and pid not in known and _is_ours(pid)]
            workers[trainer] = tuple(sorted(children, key=lambda pid: (int(started_at(pid) or 0), pid)))
        return cls(launcher, ranks, server, workers, tuple(sorted(set(names) - known)))

    def of_role(self, role: str) -> list[int]:
        """The processes of a role: ``launcher``, ``server``, ``rank``, ``worker``, ``everything``."""
        if role == "launcher":
            return [self.launcher]
        if role == "server":
            return list(self.server)
        if role == "rank":
            return sorted(self.ranks or (self.launcher,))
        if role == "worker":
            return [pid for pids in (self.workers or {}).values() for pid in pids]
        return [self.launcher, *sorted({*self.ranks, *self.server, *self.others})] if role == "everything" else []

    def place_of(self, worker: int) -> tuple[int | None, int]:
        """The rank whose worker a process is, None where the launcher is the only one, and its number there."""
        for trainer, pids in (self.workers or {}).items():
            if worker in pids:
                return self.ranks.get(trainer), pids.index(worker)
        raise ValueError(f"{worker} is no worker")


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
