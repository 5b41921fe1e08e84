"""Holds all comparisons of ranks, and answers the questions that findings ask of them."""

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
    """One statement of the report.

    Attributes:
        kind: a word that identifies it.
        level: ``fault`` (ranks aren't one agent), ``doubt`` (it can't be told) or ``note``.
        details: figures, as JSON types.
    """

    kind: str
    level: str
    text: str
    cause: str = ""
    fix: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evidence:
    """All comparisons of the ranks.

    Attributes:
        inputs: whether the ranks' data before each step are ``equal``, ``differ`` or were ``unseen``.
        unmatched: classes of normalisers that can't be matched between ranks.
        parted: the number of steps after which ranks took different numbers of steps; None if they never did, or if
            this is the evidence of the whole run.
    """

    traces: Sequence[RankTrace]
    compared: list[Comparison]
    inputs: dict[Moment, str]
    unmatched: set[str] = field(default_factory=set)
    parted: int | None = None

    def of(self, kind: str, when: str | None = None) -> list[Comparison]:
        """Returns the comparisons of one kind of tensors, at moments ``when`` if given."""
        return [c for c in self.compared if c.kind == kind and when in (None, c.moment.when)]

    def first_difference(self, kind: str, when: str | None = None) -> Comparison | None:
        """Returns the comparison of the earliest step at which tensors of a kind differ, or None."""
        unequal = [c for c in self.of(kind, when) if c.differing]
        return min(unequal, key=lambda c: c.moment.step, default=None)

    def until(self, steps: Finding | None) -> Evidence:
        """Returns the evidence from before ranks took different numbers of ``steps``; all of it if they never did."""
        if steps is None:
            return self
        first = min(steps.details["steps"].values()) + steps.details.get("before", 0)
        compared = [c for c in self.compared if c.moment.step <= first and c.moment.when != "end"]
        return replace(self, compared=compared, parted=first)

    @property
    def wrappers(self) -> set[str]:
        """The wrappers of modules found in any rank's process."""
        return set().union(*(trace.wrappers for trace in self.traces))

    @property
    def libraries(self) -> set[str]:
        """The libraries whose models any rank trains."""
        return set().union(*(trace.libraries for trace in self.traces))

    @property
    def joined(self) -> int:
        """The size of the largest process group that was seen; 0 without any."""
        return max((trace.state.get("world", {}).get("size", 0) for trace in self.traces), default=0)

    @property
    def optimizers(self) -> list[int]:
        """The numbers of all ranks' optimisers, sorted."""
        return sorted(set().union(*(trace.steps for trace in self.traces)))

    def reduced(self, optimizer: int) -> bool:
        """Returns whether an optimiser's gradients were ever equal on different data, or reduced in its ``step``."""
        gradients = [c for c in self.of("gradients") if c.moment.optimizer == optimizer]
        seen = any(c.equal and c.nonzero and self.inputs[c.moment] == "differ" for c in gradients)
        return seen or self.reduced_in_step(optimizer)

    def reduced_in_step(self, optimizer: int) -> bool:
        """Returns whether an optimiser reduces gradients itself: they differ, but parameters are equal after the step.

        Every parameter with such a gradient must have been seen to change in such a step.
        """
        unequal = [c for c in self.of("gradients") if c.moment.optimizer == optimizer and c.differing]
        equal = {c.moment.step for c in self.of("parameters", "after") if c.moment.optimizer == optimizer and c.equal}
        if not unequal or not all(c.moment.step in equal for c in unequal):
            return False
        moved = set().union(*(self._moved(optimizer, c.moment.step) for c in unequal))
        return all(name in moved for c in unequal for name in c.differing)

    def _moved(self, optimizer: int, step: int) -> set[str]:
        """Returns the names of the parameters that a step changed on the first rank."""
        first = self.traces[0]
        before = Moment(optimizer, step - 1, "after") if step > 1 else Moment(optimizer, 1, "before")
        checks = [first.checks.get(moment) for moment in (before, Moment(optimizer, step, "after"))]
        then, now = (None if check is None else check.parts.get("parameters") for check in checks)
        if then is None or now is None:
            return set()
        names = first.names.get(optimizer, {})
        return {told(place, names) for place, kept in now.items() if place in then and not same(kept, then[place])}


def gather_evidence(traces: Sequence[RankTrace]) -> Evidence:
    """Compares all ranks at all moments that they share."""
    inputs = {m: inputs_at(traces, m) for m in shared_moments(traces) if m.when == "before"}
    unmatched: set[str] = set()
    return Evidence(traces, list(comparisons(traces, unmatched)), inputs, unmatched)


def listed(ranks: Sequence[int]) -> str:
    """Formats ranks: ``rank 1``, ``ranks 0 and 1``, ``ranks 0, 1 and 2``."""
    words = [str(rank) for rank in ranks]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(words) > 1 else ''} {text}"


def difference(evidence: Evidence, c: Comparison) -> str:
    """Formats ``ranks 0 and 1 differ from optimiser step 1 in 12 of 12 tensors, first …, largest relative …``."""
    who = listed([min(t.rank for t in evidence.traces), *c.ranks])
    optimizer = of_optimizer(evidence, c.moment.optimizer)
    since = f"from optimiser step {c.moment.step}{optimizer}" if c.moment.when != "end" else "at the end"
    size = "" if not math.isfinite(c.relative) else f", largest relative difference {c.relative:.1e}"
    return f"{who} differ {since} in {len(c.differing)} of {c.compared} tensors, first {c.differing[0]}{size}"


def figures(c: Comparison) -> dict[str, Any]:
    """Returns a comparison as the details of a finding."""
    relative = c.relative if math.isfinite(c.relative) else None
    where = {"step": c.moment.step, "optimizer": c.moment.optimizer, "ranks": list(c.ranks)}
    return where | {"tensors": list(c.differing), "of": c.compared, "largest_relative_difference": relative}


def fault(kind: str, text: str, advice: str, details: dict[str, Any] | None = None) -> Finding:
    """Makes a fault with the cause and the fix that :mod:`lockstep.doctor.judge.advice` holds for a word."""
    return Finding(kind, FAULT, text, CAUSES[advice], FIXES[advice], details or {})


def of_optimizer(evidence: Evidence, optimizer: int) -> str:
    """Returns `` of optimiser N``, numbered from 1 in the order of first steps; "" if there is only one."""
    return f" of optimiser {optimizer + 1}" if len(evidence.optimizers) > 1 else ""
