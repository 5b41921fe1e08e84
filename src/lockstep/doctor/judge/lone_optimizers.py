"""Sets aside optimisers that one rank alone made, of tensors that no other rank has: a probe, a model for a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.evidence import DOUBT, Finding, listed
from lockstep.doctor.judge.traces import RankTrace


def without_lone_optimizers(traces: Sequence[RankTrace]) -> tuple[Sequence[RankTrace], Finding | None]:
    """Returns the traces without optimisers that one rank alone has, and a doubt about the first of these.

    No other rank made one with tensors of the same sizes, nor has such tensors in modules that nothing trains. All
    others must be of the same sizes, in the same order, on every rank, and are numbered anew.
    """
    if len(traces) < 2 or not all(trace.finished for trace in traces):
        return traces, None
    lone = {trace.rank: _lone(trace, [other for other in traces if other is not trace]) for trace in traces}
    having = [trace for trace in traces if lone[trace.rank]]
    left = [[o for o in sorted(trace.steps) if o not in lone[trace.rank]] for trace in traces]
    sizes = [[trace.sizes.get(o) for o in kept] for trace, kept in zip(traces, left, strict=True)]
    if len(having) != 1 or not left[0] or any(each != sizes[0] for each in sizes):
        return traces, None
    (trace,) = having
    numbers = sorted(lone[trace.rank])
    details = {"rank": trace.rank, "optimizers": numbers, "steps": [trace.steps[o] for o in numbers]}
    finding = Finding(
        "lone_optimizer", DOUBT, _text(trace, numbers), CAUSES["lone_optimizer"], FIXES["lone_optimizer"], details
    )
    return [_only(t, kept) for t, kept in zip(traces, left, strict=True)], finding


def _lone(trace: RankTrace, others: Sequence[RankTrace]) -> set[int]:
    """Returns a rank's optimisers of which no other rank made or could have made one."""
    whole = {o: sizes for o in trace.steps if (sizes := trace.sizes.get(o)) and o not in trace.by_parts}
    return {o for o, sizes in whole.items() if not any(_has(other, sizes) for other in others)}


def _has(trace: RankTrace, sizes: Sequence[int]) -> bool:
    """Returns whether a rank made an optimiser of such tensors, or has such tensors in modules that nothing trains."""
    made = [*trace.made, *trace.sizes.values()]
    return list(sizes) in made or Counter(sizes) <= Counter(trace.untrained)


def _text(trace: RankTrace, numbers: Sequence[int]) -> str:
    first = numbers[0]
    names = list(trace.names.get(first, {}).values())
    what = f"{len(trace.sizes[first])} tensors{f', first {names[0]}' if names else ''}"
    several = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return (
        f"{listed([trace.rank])} alone has optimiser {first + 1} ({what}), which took {trace.steps[first]} steps"
        f"{several}: set aside"
    )


def _only(trace: RankTrace, kept: Sequence[int]) -> RankTrace:
    """Returns a trace of some optimisers alone, numbered anew in their order."""
    number = {old: new for new, old in enumerate(kept)}

    def left(held: Mapping[int, Any]) -> dict[int, Any]:
        return {number[optimizer]: value for optimizer, value in held.items() if optimizer in number}

    checks = {
        moment._replace(optimizer=number[moment.optimizer]): check
        for moment, check in trace.checks.items()
        if moment.optimizer in number
    }
    counted = {"rates": left(trace.rates), "boundaries": left(trace.boundaries), "steps": left(trace.steps)}
    said = {"names": left(trace.names), "settings": left(trace.settings), "loaded": left(trace.loaded)}
    said |= {"wrapped": left(trace.wrapped), "sizes": left(trace.sizes)}
    sets = {"by_parts": set(left(dict.fromkeys(trace.by_parts))), "gone": set(left(dict.fromkeys(trace.gone)))}
    return replace(trace, checks=checks, **counted, **said, **sets)
