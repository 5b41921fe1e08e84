"""Repeated measurements of one program, and how they compare with the best peer's."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cases import ONE_THREAD
from benchmarks.programs import Program
from benchmarks.steady_rate import Measured

TIMES = ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")


@dataclass
class Row:
    """One program's repetitions.

    Attributes:
        case: its case; ``label``, ``env``, ``reduction``, ``framework`` and ``scaling`` are the program's.
        ours: whether it is Lockstep; ``devices`` how many with JAX; ``batched`` is the program's.
        rates: steps/s of each repetition that worked; ``failures`` says why the others did not.
        seconds: that the steady state lasted, of each repetition that worked.
        cores: CPU seconds over wall seconds, of each repetition, start-up included.
        cpu: CPU seconds of a million steps in the steady state, of each repetition in which it was seen.
        memory: most bytes of all its processes at a time, of each repetition in which it was seen.
        times: ours only, of each repetition: seconds of a mean iteration by ``TIMES`` and ``accounted``, the share of
            the wall time in which the lines arrived that the run's own ``t_iter`` accounts for.
    """

    case: str
    label: str
    env: str
    reduction: str | None
    framework: str
    scaling: str | None
    ours: bool
    devices: int | None = None
    rates: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    batched: bool = False
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program) -> Row:
        """A row without figures yet."""
        p = program
        row = cls(p.case, p.label, p.env, p.reduction, p.framework, p.scaling, p.is_ours, p.devices)
        row.batched = p.batched
        return row

    def add(self, measured: Measured) -> None:
        """Take in one repetition."""
        self.rates.append(measured.steps_per_second)
        self.seconds.append(measured.wall)
        self.cores.append(measured.cores)
        self.cpu += [] if measured.cpu is None else [measured.cpu]
        self.memory += [] if measured.memory is None else [measured.memory]
        if measured.records and all(f"time/{name}" in measured.records[0] for name in TIMES):
            self.times.append(mean_times(measured))

    @property
    def median(self) -> float | None:
        """Median steps/s; None unless every repetition worked: a figure of the lucky ones would be none."""
        return None if self.failures or not self.rates else statistics.median(self.rates)

    @property
    def busy(self) -> float | None:
        """Cores that were at work in the steady state, by CPU time; None where that wasn't seen."""
        if self.median is None or not self.cpu:
            return None
        return self.median * statistics.median(self.cpu) / 1e6

    def as_json(self) -> dict[str, Any]:
        """What the results file holds."""
        return asdict(self) | {"median": self.median}


def mean_times(measured: Measured) -> dict[str, float]:
    """Seconds of a mean iteration of the steady state by part, as the run itself reports them."""
    records = measured.records[1:]
    out = {name: statistics.fmean(record[f"time/{name}"] for record in records) for name in TIMES}
    return out | {"accounted": sum(record["time/t_iter"] for record in records) / measured.wall}


def peers_of(rows: Iterable[Row], case: str) -> list[Row]:
    """The peers that a case's rows are compared with: on both cores those of one thread, too, if they were measured."""
    cases = [case, ONE_THREAD.get(case)]
    return [row for row in rows if not row.ours and row.scaling is None and row.case in cases]


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest row that has a figure."""
    measured = [row for row in rows if row.median is not None]
    return max(measured, key=lambda row: row.median or 0.0, default=None)


def ratios(row: Row, base: Row | None) -> list[float]:
    """Steps/s as a multiple of another row's in each repetition; none where one of them has no figure.

    The two stood near to each other in time there, so that what drifts from one repetition to the next cancels.
    """
    if base is None or row.median is None or base.median is None:
        return []
    return [mine / other for mine, other in zip(row.rates, base.rates, strict=True)]


def ratio(row: Row, base: Row | None) -> float | None:
    """The median of the repetitions' ratios; None where one of the rows has no figure."""
    return statistics.median(found) if (found := ratios(row, base)) else None
