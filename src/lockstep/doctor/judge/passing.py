"""Sets aside optimisers of tensors that live for some steps: plans, adversarial examples, latent codes of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.evidence import DOUBT, Evidence, Finding, difference, figures
from lockstep.doctor.judge.traces import Moment, RankTrace

FEWEST = 3
"""Fewer optimisers of the same shapes, one after another, may be stages of one training."""
Shapes = tuple[tuple[str, int], ...]


def passing_optimizers(traces: Sequence[RankTrace]) -> set[int]:
    """Returns the optimisers of passing tensors; none if there are no others.

    On every rank at least :data:`FEWEST` optimisers have tensors of the same sizes that belong to no module, and the
    script let all but the last of them go, with their tensors.
    """
    found = set.intersection(*map(_passing, traces)) if traces else set()
    return found if any(set(trace.steps) - found for trace in traces) else set()


def _passing(trace: RankTrace) -> set[int]:
    series: dict[Shapes, list[int]] = {}
    for optimizer in sorted(trace.steps):
        shapes = _shapes(trace, optimizer)
        if shapes and not trace.names.get(optimizer):
            series.setdefault(shapes, []).append(optimizer)
    long = (each for each in series.values() if len(each) >= FEWEST and trace.gone.issuperset(each[:-1]))
    return {optimizer for each in long for optimizer in each}


def _shapes(trace: RankTrace, optimizer: int) -> Shapes:
    check = trace.checks.get(Moment(optimizer, 1, "before"))
    parameters = {} if check is None else check.parts.get("parameters", {})
    return tuple((place, kept.elements) for place, kept in parameters.items())


def set_aside(evidence: Evidence, passing: set[int]) -> tuple[Evidence, Finding | None]:
    """Returns the evidence without passing optimisers, and a doubt if what they were given or made differs."""
    if not passing:
        return evidence, None
    mine = [c for c in evidence.compared if c.moment.optimizer in passing]
    kept = [c for c in evidence.compared if c.moment.optimizer not in passing]
    inputs = {moment: word for moment, word in evidence.inputs.items() if moment.optimizer not in passing}
    traces = [trace.numbered({o: o for o in trace.steps if o not in passing}) for trace in evidence.traces]
    differing = [c for c in mine if c.differing and c.kind in ("gradients", "parameters", "moments")]
    if not differing:
        return replace(evidence, traces=traces, compared=kept, inputs=inputs), None
    found = min(differing, key=lambda c: (c.moment.optimizer, c.moment.step))
    text = f"{len(passing)} optimisers, each let go after some steps, update tensors outside of modules, which differ: "
    text += difference(evidence, found)
    doubt = Finding("passing", DOUBT, text, CAUSES["passing"], FIXES["passing"], figures(found))
    return replace(evidence, traces=traces, compared=kept, inputs=inputs), doubt
