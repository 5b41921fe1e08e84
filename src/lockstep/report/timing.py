"""Computes where a run's time went: in which part of its iterations, and on which rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.report.reading import RunFiles
from lockstep.runs.listing import number
from lockstep.runs.plot import Records

PARTS = {
    "t_rollout": "rollout",
    "t_learn": "learn",
    "t_comm": "inside collectives",
    "t_wait": "waiting for the slowest rank",
    "t_other": "metrics, logging, checkpoints, evaluations",
}
MIB = 1 << 20
TOTAL, UNKNOWN_PART = "t_iter", "not told apart"
SHORT = ("rollout", "learn", "collectives", "waiting", "other", "rest")


@dataclass(frozen=True)
class Share:
    """A part of the time: its name, its seconds, and its share of the whole."""

    name: str
    seconds: float
    share: float

    @property
    def place(self) -> int:
        """The part's index, which is also the number of its colour on the page."""
        return [*PARTS.values(), UNKNOWN_PART].index(self.name)

    @property
    def short(self) -> str:
        """The part's name in one word, for tables."""
        return SHORT[self.place]


@dataclass(frozen=True)
class Rank:
    """The totals of ``timing.jsonl`` for one rank.

    Attributes:
        parts: seconds by part.
        seconds: seconds of all its iterations.
        sent: bytes that it sent; None if nobody counted them.
        peak: peak memory in bytes; None if nobody measured it.
    """

    rank: int
    parts: list[Share]
    seconds: float
    sent: float | None
    peak: float | None

    def seconds_of(self, name: str) -> float:
        """Returns the seconds of a part; 0 if the rank spent no time in it."""
        return sum(part.seconds for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Times:
    """Where a run's time went.

    Attributes:
        parts: parts of the iterations, as means over ranks.
        seconds: seconds of all iterations.
        first: seconds of the first iteration, which may include compilation.
        ranks: the totals of each rank; empty if they weren't logged.
        waited_for: each rank that others waited for, and in what share of iterations.
        rows: number of iterations.
        whose: the run, of several seeds the seed, whose times these are.
    """

    parts: list[Share]
    seconds: float
    first: float
    ranks: list[Rank]
    waited_for: list[tuple[int, float]]
    rows: int
    whose: str

    @property
    def columns(self) -> list[Share]:
        """The parts in which some rank spent time, in their order; each is that of the first such rank."""
        found = {part.place: part for rank in reversed(self.ranks) for part in rank.parts}
        return [found[place] for place in sorted(found)]


def times_of(run: RunFiles) -> Times | None:
    """Adds up the times of a run, of several seeds those of :attr:`RunFiles.first`; None if it has none."""
    run = run.first
    known = [row for row in _rows(run) if number(row, f"time/{TOTAL}") is not None]
    if not known:
        return None
    total = sum(number(row, f"time/{TOTAL}") or 0.0 for row in known)
    sums = {part: sum(number(row, f"time/{part}") or 0.0 for row in known) for part in PARTS}
    waited = Counter(int(rank) for row in known if (rank := number(row, "time/waited_for")) is not None)
    return Times(
        _shares(sums, total),
        total,
        number(known[0], f"time/{TOTAL}") or 0.0,
        _ranks(run.timing),
        [(rank, count / len(known)) for rank, count in sorted(waited.items())],
        len(known),
        run.name,
    )


def _shares(sums: Mapping[str, float], total: float) -> list[Share]:
    """Returns the parts that took time, and the rest if it is over 2 % and belongs to no part."""
    rest = total - sum(sums.values())
    named = [(PARTS[part], seconds) for part, seconds in sums.items() if seconds > 0]
    named += [(UNKNOWN_PART, rest)] if rest > 0.02 * total else []
    whole = max(total, sum(sums.values())) or 1.0
    return [Share(name, seconds, seconds / whole) for name, seconds in named]


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[Rank]:
    """Adds up ``timing.jsonl`` by rank; if a run was resumed on more ranks, the new ones have rows only since then."""
    count = max((len(_list(row, TOTAL)) for row in rows), default=0)
    out = []
    for rank in range(count):
        sums = {part: sum(_at(row, part, rank) for row in rows) for part in PARTS}
        seconds = sum(_at(row, TOTAL, rank) for row in rows)
        sent = [_at(row, "bytes", rank) for row in rows if _list(row, "bytes")]
        peak = [_at(row, "peak_memory_mb", rank) * MIB for row in rows if _list(row, "peak_memory_mb")]
        shares = _shares(sums, seconds)
        out.append(Rank(rank, shares, seconds, sum(sent) if sent else None, max(peak, default=None)))
    return out


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    return value if isinstance(value, list) else []


def _at(row: Mapping[str, Any], key: str, rank: int) -> float:
    values = _list(row, key)
    return number({key: values[rank]}, key) or 0.0 if rank < len(values) else 0.0


def _rows(run: RunFiles) -> Records:
    return next(iter(run.first.records), [])


def world_sizes(run: RunFiles) -> list[tuple[int, int, int]]:
    """Returns, for each stretch of a run with the same number of ranks: first and last iteration, and that number."""
    rows = [row for row in _rows(run) if number(row, "time/world_size") is not None]
    stretches = itertools.groupby(rows, key=lambda row: int(row["time/world_size"]))
    found = [(ranks, list(group)) for ranks, group in stretches]
    return [(group[0]["iteration"], group[-1]["iteration"], ranks) for ranks, group in found]
