"""Moments that a fault is aimed at, as they begin, and whether it struck what it was aimed at."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import select
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.chaos.processes import Processes
from lockstep.core.life import LINE_BYTES, Part, shared_signs

AIMED_SECONDS, BLIND_SECONDS = 0.001, 0.01
"""Longest delays from a moment to the deed: a commit takes some milliseconds."""
_CREATED = 0x100
_EVENT = struct.Struct("iIII")
_TEMPORARY = re.compile(r"\.(step_\d+)\.\d+\.tmp")
_MEMORY = "/memfd:lockstep (deleted)"


class Aim:
    """What a fault is aimed at; this one at nothing that could be missed."""

    longest: ClassVar[float] = BLIND_SECONDS

    def struck(self) -> bool | None:
        """Whether the fault met it, asked once the fault has taken effect; None: nobody can tell."""
        return None


@dataclass(frozen=True)
class Commit(Aim):
    """A checkpoint that is being written: into ``temporary``, which is renamed once it is whole."""

    longest: ClassVar[float] = AIMED_SECONDS
    temporary: Path

    def struck(self) -> bool:
        """Whether it isn't in its place: of a writer that was killed, whether it was torn."""
        match = _TEMPORARY.fullmatch(self.temporary.name)
        assert match is not None
        return not self.temporary.with_name(match[1]).exists()


@dataclass(frozen=True)
class Evaluation(Aim):
    """An evaluation of a run of several ranks, which show in shared memory what they are at: also after their death."""

    longest: ClassVar[float] = AIMED_SECONDS
    memory: mmap.mmap
    rank: int

    def struck(self) -> bool:
        """Whether the rank is in an evaluation, or was to the last."""
        return shared_signs(self.memory, self.rank + 1)[self.rank].part is Part.EVALUATION


def evaluation_of(processes: Processes, victims: Collection[int]) -> Evaluation | None:
    """The evaluations of the rank that will be struck, or the first; None where ranks don't share memory."""
    struck = [processes.ranks[pid] for pid in victims if pid in processes.ranks]
    for pid in processes.ranks:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if os.readlink(link) == _MEMORY:
                    return Evaluation(_mapped(link, len(processes.ranks)), min(struck, default=0))
    return None


def _mapped(link: Path, ranks: int) -> mmap.mmap:
    descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, ranks * LINE_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


class Commits:
    """Tells of commits as they begin: the kernel wakes us, where looking again and again would wait for a processor."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder, self._descriptor = folder, descriptor

    def next(self, seconds: float) -> Commit | None:
        """Waits so long, at most, for a commit to begin."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return None
        names = list(_names(os.read(self._descriptor, 1 << 16)))
        found = [name for name in names if _TEMPORARY.fullmatch(name)]
        return Commit(self._folder / found[-1]) if found else None


@contextmanager
def commits_in(folder: Path) -> Iterator[Commits]:
    """Watches the checkpoints of a run for as long as the block runs (Linux: inotify).

    Raises:
        OSError: there is no such directory, or it can't be watched.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        if library.inotify_add_watch(descriptor, os.fsencode(folder), _CREATED) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
        yield Commits(folder, descriptor)
    finally:
        os.close(descriptor)


def _names(events: bytes) -> Iterator[str]:
    """The names in what inotify wrote."""
    at = 0
    while at < len(events):
        *_, length = _EVENT.unpack_from(events, at)
        at += _EVENT.size
        yield os.fsdecode(events[at : at + length].rstrip(b"\0"))
        at += length
