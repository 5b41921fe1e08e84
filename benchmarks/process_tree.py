"""Memory and CPU time of processes and of all that they start, read from ``/proc`` while they run.

A page that several processes share counts once, as in the kernel's proportional set size: forked workers hold most of
their parent's pages in common. What processes have used that are gone already is in their parents' figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SHARE_OF_TIME = 0.02
"""On two cores looking disturbs what is measured."""
SHARE_WHILE_TIMED = 0.125
"""Of that, while what takes all cores is timed."""
PROC = Path("/proc")


@dataclass
class Sample:
    """One look: seconds by the performance counter, CPU seconds so far, bytes of memory where those were looked at."""

    time: float
    cpu: float
    memory: int | None


@dataclass
class ProcessTree:
    """What some processes and all that they start use.

    What is a child of one of them counts, whatever its session, and what is of a session of one of them, whatever
    became of its parent.

    Attributes:
        roots: ids of the processes.
        shortest: seconds between two looks at least.
        share: of the wall time, what looking at CPU time may take at most, and what looking at memory may, which takes
            several times as long.
        samples: what was seen.
        proc: where the system tells it; where there is no such place nothing is seen.
    """

    roots: set[int] = field(default_factory=set)
    shortest: float = 0.2
    share: float = SHARE_OF_TIME
    samples: list[Sample] = field(default_factory=list)
    proc: Path = PROC
    _next: float = 0.0
    _next_memory: float = 0.0

    def look_if_due(self, timed: bool = False) -> None:
        """Takes a sample, unless the last one is too recent for what one costs; ``timed``: while it counts most."""
        begun = time.perf_counter()
        if begun < self._next:
            return
        share = self.share * SHARE_WHILE_TIMED if timed else self.share
        memory = begun >= self._next_memory
        processes = self._processes()
        cpu = self._sum(self._cpu_seconds, processes)
        looked = time.perf_counter()
        self._next = begun + max(self.shortest, (looked - begun) / share)
        held = self._sum(self._bytes, processes) if memory else None
        if memory:
            self._next_memory = begun + max(self.shortest, (time.perf_counter() - looked) / share)
        if cpu is not None and (held is not None or not memory):
            self.samples.append(Sample(begun, cpu, None if held is None else int(held)))

    def look(self) -> None:
        """Takes a sample now."""
        self._next = self._next_memory = 0.0
        self.look_if_due()

    @property
    def peak(self) -> int | None:
        """The highest sum of bytes that was seen, None if nothing was."""
        return max((sample.memory for sample in self.samples if sample.memory is not None), default=None)

    def cores_between(self, begin: float, end: float) -> float | None:
        """CPU seconds a second, from the first to the last look between two moments; None with fewer than two."""
        inside = [sample for sample in self.samples if begin <= sample.time <= end]
        if len(inside) < 2:
            return None
        return (inside[-1].cpu - inside[0].cpu) / (inside[-1].time - inside[0].time)

    def _processes(self) -> set[int]:
        """Ids of the processes that count and are there."""
        parents, sessions = {}, {}
        with suppress(OSError):
            for name in filter(str.isdigit, os.listdir(self.proc)):
                with suppress(OSError, ValueError, IndexError):
                    fields = self._fields(self.proc / name)
                    parents[int(name)], sessions[int(name)] = int(fields[1]), int(fields[3])
        found: set[int] = set()
        while True:
            known = self.roots | found
            more = {n for n, parent in parents.items() if n in known or parent in known or sessions[n] in known}
            if more <= found:
                return found
            found |= more

    def _sum(self, of: Callable[[Path], float], processes: set[int]) -> float | None:
        """What processes use together, those left out that end while they are looked at; None: nothing was seen."""
        found = []
        for number in processes:
            with suppress(OSError, ValueError, IndexError):
                found.append(of(self.proc / str(number)))
        return sum(found) if found else None

    @staticmethod
    def _fields(process: Path) -> list[str]:
        """What stands in ``stat`` after the name, which may hold anything; see proc(5)."""
        return (process / "stat").read_text().rpartition(")")[2].split()

    def _cpu_seconds(self, process: Path) -> float:
        return sum(map(int, self._fields(process)[11:15])) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _bytes(process: Path) -> int:
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
        return 0
