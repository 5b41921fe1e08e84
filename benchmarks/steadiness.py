"""How steady a machine is while it is measured on: a loop of pure Python, timed over and over.

A virtual machine's cores may be shared with others, who neither show in its load nor in its counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

TURNS = 1_000_000
BUSY = 1.25
"""The slowest tenth of the loops over the fastest from which on a machine is called unsteady."""


def loop_seconds(clock: Callable[[], float] = time.perf_counter) -> float:
    """Times the loop once: some 0.07 s."""
    started, total = clock(), 0
    for turn in range(TURNS):
        total += turn
    return clock() - started


def steadiness(seconds: Sequence[float]) -> str:
    """Says how far loops lie apart that were timed in the course of a run, and what that means."""
    in_order = sorted(seconds)
    fastest, slow = in_order[0], in_order[(9 * len(in_order)) // 10]
    times = f"{1000 * median(in_order):.0f} ms (fastest {1000 * fastest:.0f}, slowest {1000 * in_order[-1]:.0f})"
    said = f"the same loop of Python took {times}, {len(in_order)} times in the course of the run"
    if slow < BUSY * fastest:
        return said
    return f"{said}; a tenth took {slow / fastest:.1f} times the fastest or more: others use these cores too"
