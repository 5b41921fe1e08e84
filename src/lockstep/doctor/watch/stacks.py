"""Tells, from another thread, whether a rank waits for others, by the stack of its main thread."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import traceback
from types import FrameType

COLLECTIVES = (os.path.join("torch", "distributed", ""), os.path.join("torch", "nn", "parallel", "distributed.py"))
"""Parts of the paths of files in which a rank waits for others."""
STORAGE = (os.path.join("torch", "distributed", "checkpoint", ""),)
"""Here a rank reads and writes files; if it waits for others, the frame of a collective is further in."""
LAUNCHERS = tuple(os.path.join("torch", "distributed", *part) for part in (
    ("elastic", "multiprocessing", ""), ("elastic", "agent", ""), ("launcher", ""), ("run.py",)))  # fmt: skip
"""These start ranks, or wrap all of a rank's program (``@record``)."""
BACKWARD = (os.path.join("torch", "autograd", ""),)
"""DDP and FSDP wait inside the backward pass; but a backward pass may also just take long."""
INNERMOST = 8
LONGEST_TICK = 1.0
"""The most seconds that count between two looks: a process that was suspended didn't wait all that time."""
IDLE = 0.05
"""A rank that uses less of a core than this isn't computing, even if many processes share the core."""
OURS = (os.path.dirname(__file__) + os.sep, "<frozen ")


def frame_lines(frame: FrameType) -> list[str]:
    """Returns ``file:line function`` of every frame of the script, the innermost first."""
    return stack_lines(traceback.extract_stack(frame))


def stack_lines(entries: traceback.StackSummary) -> list[str]:
    """Returns ``file:line function`` of every entry, the innermost first, without the doctor's own frames."""
    shown = [entry for entry in entries if not entry.filename.startswith(OURS)]
    return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(shown)]


def stands_in(lines: list[str], places: tuple[str, ...]) -> bool:
    """Returns whether one of a stack's :data:`INNERMOST` lines is in one of some files; innermost line first."""
    return any(place in line.rpartition(":")[0] for line in lines[:INNERMOST] for place in places)


def stands_in_collective(lines: list[str]) -> bool:
    """Returns whether a stack, innermost first, ends in a collective, not in checkpointing or a launcher."""
    near = next((line for line in lines[:INNERMOST] if stands_in([line], COLLECTIVES)), None)
    return near is not None and not stands_in([near], STORAGE + LAUNCHERS)


def waits_for_work(lines: list[str]) -> bool:
    """Returns whether the innermost source line calls ``.wait(``: ``work.wait()`` is C++ and has no frame."""
    place = lines[0].rpartition(" ")[0] if lines else ""
    file, _, number = place.rpartition(":")
    return number.isdecimal() and ".wait(" in linecache.getline(file, int(number))


def own_lines(lines: list[str]) -> list[str]:
    """Returns the script's own lines of a stack, without libraries'."""
    libraries = (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__))
    return [line for line in lines if not any(part in line for part in libraries)]


def wakings() -> int:
    """Returns the main thread's voluntary context switches so far; 0 if the kernel doesn't tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    except (OSError, StopIteration, ValueError):
        return 0


class StillnessClock:
    """Measures how long the main thread has waited in one place without a sign of life.

    A place is the stack's frames with their next instructions. A loop that spends nearly all its time in one call (it
    receives or sleeps) seems to stand still at every look; but it wakes up in between, which the kernel counts. So time
    that only idleness shows counts from the last wake-up.

    Attributes:
        lines: the stack that stands still, innermost call first.
        certain: whether the place itself shows waiting, rather than only that nothing moves.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._place: tuple[object, ...] = ()
        self._seconds = 0.0
        self._last = time.monotonic()
        self._busy_before = time.process_time()
        self._wakings_before = wakings()
        self._asleep_since = 0.0
        self.lines: list[str] = []
        self.certain = False

    def look(self, signs_of_life: int, *, on_gpu: bool = False, joined: bool = False) -> float | None:
        """Returns the seconds of waiting so far; None if the rank isn't waiting for others.

        Args:
            signs_of_life: changes whenever the rank does something that the doctor sees.
            on_gpu: collectives run on a GPU, so that any call that first needs a result may wait for them.
            joined: the rank is in a process group. If it is idle, it may wait in a call that its stack doesn't show
                (``work.wait()`` in a line of the script).
        """
        frame = sys._current_frames().get(self._main)
        place: list[object] = [signs_of_life]
        walk = frame
        while walk is not None:
            place += [walk.f_code, walk.f_lasti]
            walk = walk.f_back
        now = time.monotonic()
        self._seconds += min(now - self._last, LONGEST_TICK)
        self._last = now
        if tuple(place) != self._place or frame is None:
            self._place, self._seconds, self.lines = tuple(place), 0.0, []
            self._busy_before, self._wakings_before, self._asleep_since = time.process_time(), wakings(), 0.0
            return None
        self.lines = self.lines or frame_lines(frame)
        idle = time.process_time() - self._busy_before < IDLE * self._seconds
        woken = wakings()
        if woken != self._wakings_before:
            self._wakings_before, self._asleep_since = woken, self._seconds
        asleep = self._seconds - self._asleep_since
        blocked = joined and idle and asleep > 0.0
        # Forward passes of DDP and FSDP have their frames around those of layers, which may just take long.
        inside = stands_in(self.lines[:1], COLLECTIVES) or idle
        stands = (stands_in_collective(self.lines) and inside) or (stands_in(self.lines, BACKWARD) and idle)
        self.certain = stands or (blocked and waits_for_work(self.lines))
        if stands or on_gpu:
            return self._seconds
        return asleep if blocked else None
