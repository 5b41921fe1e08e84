"""Holds what the comparison of ranks found, for the questions that are asked of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import Comparison, comparisons, inputs_at, same, shared_moments, told
from lockstep.doctor.judge.traces import Moment, RankTrace

FAULT, DOUBT, NOTE = "fault", "doubt", "note"


@dataclass(frozen=True)
class Finding:
    """Something to tell.

    Attributes:
        kind: a word for it.
        level: ``fault`` (ranks aren't one agent), ``doubt`` (can't be told) or ``note``.
        details: figures, of JSON types.
    """

    kind: str
    level: str
    text: str
    cause: str = ""
    fix: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evidence:
    """All comparisons, sorted for the questions that are asked of them.

    ``unmatched`` are classes of normalisers, ``parted`` is the number of steps after which ranks took others; None if
    they never did, or all is to be judged.
    """

    traces: Sequence[RankTrace]
    compared: list[Comparison]
    inputs: dict[Moment, str]
    unmatched: set[str] = field(default_factory=set)
    parted: int | None = None

    def of(self, kind: str, when: str | None = None) -> list[Comparison]:
        """Comparisons of one kind of tensors."""
        return [c for c in self.compared if c.kind == kind and when in (None, c.moment.when)]

    def first_difference(self, kind: str, when: str | None = None) -> Comparison | None:
        """The earliest step at which tensors of a kind differ."""
        unequal = [c for c in self.of(kind, when) if c.differing]
        return min(unequal, key=lambda c: c.moment.step, default=None)

    def until(self, steps: Finding | None) -> Evidence:
        """What was compared before ranks first took different numbers of steps; all if they never did."""
        if steps is None:
            return self
        first = min(steps.details["steps"].values()) + steps.details.get("before", 0)
        compared = [c for c in self.compared if c.moment.step <= first and c.moment.when != "end"]
        return replace(self, compared=compared, parted=first)

    @property
    def wrappers(self) -> set[str]:
        """Of modules in any rank's process."""
        return set().union(*(trace.wrappers for trace in self.traces))

    @property
    def libraries(self) -> set[str]:
        """Of any rank's process."""
        return set().union(*(trace.libraries for trace in self.traces))

    @property
    def joined(self) -> int:
        """The largest process group that was seen, 0 without any."""
        return max((trace.state.get("world", {}).get("size", 0) for trace in self.traces), default=0)

    @property
    def optimizers(self) -> list[int]:
        """Of any rank."""
        return sorted(set().union(*(trace.steps for trace in self.traces)))

    def reduced(self, optimizer: int) -> bool:
        """Whether an optimiser's gradients were ever equal though the data differed, or made equal by its ``step``."""
        gradients = [c for c in self.of("gradients") if c.moment.optimizer == optimizer]
        seen = any(c.equal and c.nonzero and self.inputs[c.moment] == "differ" for c in gradients)
        return seen or self.reduced_in_step(optimizer)

    def reduced_in_step(self, optimizer: int) -> bool:
        """Whether steps made of gradients that differ the same parameters on all ranks: it reduces them itself.

        Every parameter with such a gradient must have been seen to move by such a step.
        """
        unequal = [c for c in self.of("gradients") if c.moment.optimizer == optimizer and c.differing]
        equal = {c.moment.step for c in self.of("parameters", "after") if c.moment.optimizer == optimizer and c.equal}
        if not unequal or not all(c.moment.step in equal for c in unequal):
            return False
        moved = set().union(*(self._moved(optimizer, c.moment.step) for c in unequal))
        return all(name in moved for c in unequal for name in c.differing)

    def _moved(self, optimizer: int, step: int) -> set[str]:
        """Names of the parameters that a step changed, seen on the first rank."""
        first = self.traces[0]
        before = Moment(optimizer, step - 1, "after") if step > 1 else Moment(optimizer, 1, "before")
        checks = [first.checks.get(moment) for moment in (before, Moment(optimizer, step, "after"))]
        then, now = (None if check is None else check.parts.get("parameters") for check in checks)
        if then is None or now is None:
            return set()
        names = first.names.get(optimizer, {})
        return {told(place, names) for place, kept in now.items() if place in then and not same(kept, then[place])}


def gather_evidence(traces: Sequence[RankTrace]) -> Evidence:
    """Compare all ranks."""
    inputs = {m: inputs_at(traces, m) for m in shared_moments(traces) if m.when == "before"}
    unmatched: set[str] = set()
    return Evidence(traces, list(comparisons(traces, unmatched)), inputs, unmatched)


def listed(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0 and 1``, ``ranks 0, 1 and 2``."""
    words = [str(rank) for rank in ranks]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(words) > 1 else ''} {text}"


def difference(evidence: Evidence, c: Comparison) -> str:
    """``ranks 0 and 1 differ from optimiser step 1 in 12 of 12 tensors, first …, largest relative difference …``."""
    who = listed([min(t.rank for t in evidence.traces), *c.ranks])
    optimizer = of_optimizer(evidence, c.moment.optimizer)
    since = f"from optimiser step {c.moment.step}{optimizer}" if c.moment.when != "end" else "at the end"
    size = "" if not math.isfinite(c.relative) else f", largest relative difference {c.relative:.1e}"
    return f"{who} differ {since} in {len(c.differing)} of {c.compared} tensors, first {c.differing[0]}{size}"


def figures(c: Comparison) -> dict[str, Any]:
    """A comparison as details of a finding."""
    relative = c.relative if math.isfinite(c.relative) else None
    where = {"step": c.moment.step, "optimizer": c.moment.optimizer, "ranks": list(c.ranks)}
    return where | {"tensors": list(c.differing), "of": c.compared, "largest_relative_difference": relative}


def fault(kind: str, text: str, advice: str, details: dict[str, Any] | None = None) -> Finding:
    """A fault whose cause and fix are known by a word."""
    return Finding(kind, FAULT, text, CAUSES[advice], FIXES[advice], details or {})


def of_optimizer(evidence: Evidence, optimizer: int) -> str:
    """Names an optimiser by the order of their first steps, from 1; nothing if it is the only one."""
    return f" of optimiser {optimizer + 1}" if len(evidence.optimizers) > 1 else ""
