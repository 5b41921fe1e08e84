"""Counts the work that a process has done, which tells ranks that work from ranks that hang.

A heartbeat thread could not: it beats on while the main thread hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from lockstep.core.topology import Topology

LINE_BYTES = 128  # two cache lines for each rank, because processors fetch them in pairs
_WORDS = LINE_BYTES // 8
_COUNT, _PART, _WAITS, _PID = range(4)


class Part(StrEnum):
    """Names the part of a run that a rank is in, as it reads after "in"."""

    START = "its start"
    ROLLOUT = "a rollout"
    UPDATE = "an update"
    EVALUATION = "an evaluation"
    VIDEO = "a video"
    CHECKPOINT = "a checkpoint"
    RESUMING = "restoring its environments"
    LOGGING = "logging"
    PROGRAM = "a compiled program"


_PARTS = tuple(Part)


class Sign(NamedTuple):
    """The progress that a rank has shown.

    Attributes:
        count: everything that it has done: steps, episodes, frames and files, counted together.
        part: the part of the run that it is in.
        waits: whether it waits for other ranks.
    """

    count: int
    part: Part
    waits: bool


class Life:
    """Counts what this process does, in its own memory or in ``memory`` that the ranks of a host share.

    Attributes:
        trains: whether training has begun, after which a failure isn't the fault of the request.
    """

    def __init__(self) -> None:
        self.trains = False
        self._words = memoryview(array("q", [0] * _WORDS))
        self.memory: mmap.mmap | None = None

    def inherit(self, topology: Topology) -> None:
        """Counts where the other ranks of this host can read it from now on, if the launcher passed shared memory."""
        if topology.memory is not None:
            os.set_inheritable(topology.memory, False)
            self.share(mmap.mmap(topology.memory, topology.world_size * LINE_BYTES), topology.rank)

    def share(self, memory: mmap.mmap, rank: int) -> None:
        """Counts in this rank's line of shared memory from now on; the memory has ``LINE_BYTES`` for each rank."""
        self.memory = memory
        line = memoryview(memory)[rank * LINE_BYTES : (rank + 1) * LINE_BYTES].cast("q")
        line[:_PID] = self._words[:_PID]
        line[_PID] = os.getpid()
        self._words = line

    def leave(self, memory: mmap.mmap) -> None:
        """Counts in its own memory again, if it has counted in ``memory``."""
        if self.memory is memory:
            self._words, self.memory = memoryview(array("q", self._words)), None

    def begin(self, part: Part) -> None:
        """Enters a part of the run, which counts as progress."""
        self._words[_PART] = _PARTS.index(part)
        self._words[_COUNT] += 1

    def progressed(self) -> None:
        """Counts one thing done: a step, an episode, a frame or a file."""
        self._words[_COUNT] += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks this process as waiting for other ranks in the block; see :meth:`wait` and :meth:`go_on`."""
        self.wait()
        yield
        self.go_on()

    def wait(self) -> None:
        """Marks this process as waiting for other ranks until :meth:`go_on`."""
        self._words[_WAITS] = 1

    def go_on(self) -> None:
        """Ends the waiting, which counts as progress if this process has counted anything before."""
        self._words[_WAITS] = 0
        self._words[_COUNT] += self._words[_COUNT] > 0

    def sign(self) -> Sign:
        """Returns the progress that this process has shown."""
        return _sign(self._words)


def shared_signs(memory: mmap.mmap, world_size: int) -> list[Sign]:
    """Reads every rank's sign from the memory that they count in."""
    words = memoryview(memory)[: world_size * LINE_BYTES].cast("q")
    return [_sign(words[r * _WORDS : (r + 1) * _WORDS]) for r in range(world_size)]


def shared_pid(memory: mmap.mmap, rank: int) -> int:
    """Reads the process id of a rank from the memory that it counts in; 0 until it counts there."""
    return memoryview(memory)[rank * LINE_BYTES : (rank + 1) * LINE_BYTES].cast("q")[_PID]


def _sign(words: memoryview) -> Sign:
    return Sign(words[_COUNT], _PARTS[words[_PART]], bool(words[_WAITS]))


life = Life()
"""This process's counter; a global, because progress is made in many places."""
