"""Says where the time of a run went: in which part of its iterations, and on which rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.report.reading import RunFiles, number
from lockstep.runs.plot import Records

PARTS = {
    "t_rollout": "rollout",
    "t_learn": "learn",
    "t_comm": "inside collectives",
    "t_wait": "waiting for the slowest rank",
    "t_other": "metrics, logging, checkpoints, evaluations",
}
TOTAL, UNKNOWN_PART = "t_iter", "not told apart"
SHORT = ("rollout", "learn", "collectives", "waiting", "other", "rest")


@dataclass(frozen=True)
class Share:
    """A part of the time: what it is, its seconds, and its share of all."""

    name: str
    seconds: float
    share: float

    @property
    def place(self) -> int:
        """Which part it is, the number of its colour on the page."""
        return [*PARTS.values(), UNKNOWN_PART].index(self.name)

    @property
    def short(self) -> str:
        """Its name in a word, for tables."""
        return SHORT[self.place]


@dataclass(frozen=True)
class Rank:
    """What ``timing.jsonl`` adds up to for a rank: seconds by part, of its iterations, bytes, and MiB at the most."""

    rank: int
    parts: list[Share]
    seconds: float
    sent: float
    peak: float

    def seconds_of(self, name: str) -> float:
        """The seconds of a part; 0 of one that this rank had no time in."""
        return sum(part.seconds for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Times:
    """Where the time went.

    Attributes:
        parts: of the iterations, as means over ranks.
        seconds: of all iterations, and of the ``first``, which a compiler may have had.
        ranks: of each rank, where that was logged.
        waited_for: how often each rank was the one that others waited for.
        rows: how many iterations that is about.
    """

    parts: list[Share]
    seconds: float
    first: float
    ranks: list[Rank]
    waited_for: list[tuple[int, float]]
    rows: int


def times_of(run: RunFiles) -> Times | None:
    """Adds up the times of a run, of several seeds the first one's; None without any."""
    rows = _of_the_first(run)
    known = [row for row in rows if number(row, f"time/{TOTAL}") is not None]
    if not known:
        return None
    total = sum(number(row, f"time/{TOTAL}") or 0.0 for row in known)
    sums = {part: sum(number(row, f"time/{part}") or 0.0 for row in known) for part in PARTS}
    waited = Counter(int(rank) for row in known if (rank := number(row, "time/waited_for")) is not None)
    return Times(
        _shares(sums, total),
        total,
        number(known[0], f"time/{TOTAL}") or 0.0,
        _ranks((run.seeds[0] if run.seeds else run).timing),
        [(rank, count / waited.total()) for rank, count in sorted(waited.items())],
        len(known),
    )


def _shares(sums: Mapping[str, float], total: float) -> list[Share]:
    """The parts that took time, and the rest that no clock has told apart."""
    rest = total - sum(sums.values())
    named = [(PARTS[part], seconds) for part, seconds in sums.items() if seconds > 0]
    named += [(UNKNOWN_PART, rest)] if rest > 0.02 * total else []
    whole = max(total, sum(sums.values())) or 1.0
    return [Share(name, seconds, seconds / whole) for name, seconds in named]


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[Rank]:
    """The ranks of ``timing.jsonl``; a run that was resumed on more has times of some from there on alone."""
    count = max((len(_list(row, TOTAL)) for row in rows), default=0)
    out = []
    for rank in range(count):
        sums = {part: sum(_at(row, part, rank) for row in rows) for part in PARTS}
        seconds = sum(_at(row, TOTAL, rank) for row in rows)
        sent = sum(_at(row, "bytes", rank) for row in rows)
        peak = max(_at(row, "peak_memory_mb", rank) for row in rows)
        out.append(Rank(rank, _shares(sums, seconds), seconds, sent, peak))
    return out


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    return value if isinstance(value, list) else []


def _at(row: Mapping[str, Any], key: str, rank: int) -> float:
    values = _list(row, key)
    return number({key: values[rank]}, key) or 0.0 if rank < len(values) else 0.0


def _of_the_first(run: RunFiles) -> Records:
    """A run's rows, of several seeds those of the first that has any."""
    return next(filter(None, run.records), [])


def world_sizes(run: RunFiles) -> list[tuple[int, int, int]]:
    """On how many ranks a run's iterations were trained: the first and the last of each stretch, and the ranks."""
    rows = [row for row in _of_the_first(run) if number(row, "time/world_size") is not None]
    stretches = itertools.groupby(rows, key=lambda row: int(row["time/world_size"]))
    found = [(ranks, list(group)) for ranks, group in stretches]
    return [(group[0]["iteration"], group[-1]["iteration"], ranks) for ranks, group in found]
