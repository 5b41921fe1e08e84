"""Tells ranks that work from ranks that hang: by what they have done, never by a thread that beats by itself."""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from lockstep.core.topology import Topology

LINE_BYTES = 128  # for each rank two cache lines, which processors fetch in pairs
_WORDS = LINE_BYTES // 8
_COUNT, _PART, _WAITS, _PID = range(4)


class Part(StrEnum):
    """Names what of a run a rank is at, as after "in"."""

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
    """What a rank has shown of itself.

    Attributes:
        count: steps, episodes, frames, files: all that it has done, counted together.
        part: at which part of the run it is.
        waits: whether it waits for other ranks.
    """

    count: int
    part: Part
    waits: bool


class Life:
    """Counts what this process does, in memory of its own, or in ``memory`` that the ranks of a host share.

    Attributes:
        trains: whether training has begun, so that what fails isn't what was asked for.
    """

    def __init__(self) -> None:
        self.trains = False
        self._words = memoryview(array("q", [0] * _WORDS))
        self.memory: mmap.mmap | None = None

    def inherit(self, topology: Topology) -> None:
        """Counts from here on where the other ranks of this host see it, if the launcher gave them memory for it."""
        if topology.memory is not None:
            os.set_inheritable(topology.memory, False)
            self.share(mmap.mmap(topology.memory, topology.world_size * LINE_BYTES), topology.rank)

    def share(self, memory: mmap.mmap, rank: int) -> None:
        """Counts from here on in a rank's line of memory that begins with one of ``LINE_BYTES`` for each rank."""
        self.memory = memory
        line = memoryview(memory)[rank * LINE_BYTES : (rank + 1) * LINE_BYTES].cast("q")
        line[:_PID] = self._words[:_PID]
        line[_PID] = os.getpid()
        self._words = line

    def leave(self, memory: mmap.mmap) -> None:
        """Counts in memory of its own again, if it has counted in this."""
        if self.memory is memory:
            self._words, self.memory = memoryview(array("q", self._words)), None

    def begin(self, part: Part) -> None:
        """Begins a part of the run; that counts."""
        self._words[_PART] = _PARTS.index(part)
        self._words[_COUNT] += 1

    def progressed(self) -> None:
        """Counts something that is done: a step, an episode, a frame, a file."""
        self._words[_COUNT] += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Waits for other ranks in the block; that they all came counts, if anything does in this process."""
        self.wait()
        yield
        self.go_on()

    def wait(self) -> None:
        """Waits for other ranks from here on, see :meth:`waiting`."""
        self._words[_WAITS] = 1

    def go_on(self) -> None:
        """Has what was waited for."""
        self._words[_WAITS] = 0
        self._words[_COUNT] += self._words[_COUNT] > 0

    def sign(self) -> Sign:
        """Returns what this process has shown of itself."""
        return _sign(self._words)


def shared_signs(memory: mmap.mmap, world_size: int) -> list[Sign]:
    """Reads every rank's line of memory in which they count."""
    words = memoryview(memory)[: world_size * LINE_BYTES].cast("q")
    return [_sign(words[r * _WORDS : (r + 1) * _WORDS]) for r in range(world_size)]


def shared_pid(memory: mmap.mmap, rank: int) -> int:
    """Reads the process id of a rank that counts in this memory, 0 before it does."""
    return memoryview(memory)[rank * LINE_BYTES : (rank + 1) * LINE_BYTES].cast("q")[_PID]


def _sign(words: memoryview) -> Sign:
    return Sign(words[_COUNT], _PARTS[words[_PART]], bool(words[_WAITS]))


life = Life()
"""This process's; one, for what counts is done in many places."""
