"""Tells gradients that are summed over ranks from those that are averaged, and from those of one rank alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import same
from lockstep.doctor.judge.evidence import DOUBT, NOTE, Evidence, Finding, of_optimizer
from lockstep.doctor.judge.traces import Check, Kept, Moment, RankTrace

CLOSE = 1e-3
"""The largest relative deviation that is taken for rounding."""
MOVED = 0.05
"""That of what a step added to parameters, which are larger than it and rounded."""


def summed_finding(evidence: Evidence) -> Finding | None:
    """Notes gradients that are ``ranks`` times the ranks' mean, so their sum, or that mean over ``ranks`` again.

    Steps whose gradients were clipped afterwards show another multiple and don't count. Whether the loss was divided
    beforehand, which would make a sum right, can't be seen.
    """
    ranks = len(evidence.traces)
    for optimizer, (averaged, steps, twice) in _judged(evidence).items():
        if twice and not averaged and not steps:
            text = f"gradients{of_optimizer(evidence, optimizer)} are their mean over ranks, divided by {ranks} once "
            text += "more: right only if the loss is multiplied by it"
            return Finding("averaged_twice", NOTE, text, "", FIXES["averaged_twice"], {"optimizer": optimizer})
        if steps and not averaged:
            text = f"gradients{of_optimizer(evidence, optimizer)} are the sum over ranks, {ranks} times their mean: "
            text += "right if the loss is divided by the number of ranks; if not, every step depends on that number"
            return Finding("summed", NOTE, text, "", FIXES["summed"], {"optimizer": optimizer, "steps": steps})
    return None


def alone_finding(evidence: Evidence) -> Finding | None:
    """Finds gradients that are one rank's own at every step, so that what the others computed is lost."""
    for optimizer in evidence.optimizers:
        found = [
            _whose(evidence.traces, *samples)
            for moment in _reduced(evidence, optimizer)
            if (samples := _samples(evidence.traces, moment)) is not None
        ]
        if found and found[0] is not None and len(set(found)) == 1:
            text = f"gradients{of_optimizer(evidence, optimizer)} are those of rank {found[0]} alone, on every rank: "
            text += "they were sent, not reduced"
            details = {"optimizer": optimizer, "rank": found[0], "steps": len(found)}
            return Finding("alone", DOUBT, text, CAUSES["alone"], FIXES["alone"], details)
    return None


def parts_alone_finding(evidence: Evidence) -> Finding | None:
    """Finds parts of the parameters that each rank steps with the gradient that ``backward`` left there, unreduced."""
    for optimizer in sorted(set.intersection(*(trace.by_parts for trace in evidence.traces))):
        moments = [m for m, word in evidence.inputs.items() if m.optimizer == optimizer and word == "differ"]
        checks = [trace.checks[moment] for trace in evidence.traces for moment in moments]
        seen = [check for check in checks if check.parts.get("own") and not check.facts.get("hooked", True)]
        own = [(kept, c.parts["stepped"].get(place)) for c in seen for place, kept in c.parts["own"].items()]
        if len(seen) < len(evidence.traces) or not any(np.any(kept.numbers) for kept, _ in own):
            continue
        if all(stepped is not None and same(kept, stepped) for kept, stepped in own):
            text = f"each rank's part of the gradients{of_optimizer(evidence, optimizer)} is of its own data alone: "
            text += f"none was changed between backward and the step, at {len(seen) // len(evidence.traces)} steps"
            details = {"optimizer": optimizer}
            return Finding("alone", DOUBT, text, CAUSES["parts_alone"], FIXES["parts_alone"], details)
    return None


def alone_in_step_finding(evidence: Evidence) -> Finding | None:
    """Finds parameters that ranks step by turns and send, each with one rank's own gradient: ZeRO without a reduction.

    Parameters are equal after the step, as if it had reduced the gradients.
    """
    for optimizer in evidence.optimizers:
        if evidence.reduced_in_step(optimizer) and _takes_single_gradients(evidence.traces, optimizer):
            text = f"each parameter{of_optimizer(evidence, optimizer)} is stepped with the gradient of one rank alone, "
            text += "and then sent: gradients differ before the step, and nothing reduces them"
            details = {"optimizer": optimizer}
            return Finding("alone", DOUBT, text, CAUSES["parts_alone"], FIXES["parts_alone"], details)
    return None


def _takes_single_gradients(traces: Sequence[RankTrace], optimizer: int) -> bool:
    """Returns whether an optimiser's first step shows single ranks' gradients, and of no parameter their mean.

    It shows in moments that one rank alone keeps of a parameter, and in what the step added to parameters.
    """
    before, after = ([t.checks.get(Moment(optimizer, 1, when)) for t in traces] for when in ("before", "after"))
    then, now = ([check for check in each if check is not None] for each in (before, after))
    if not len(then) == len(now) == len(traces):
        return False
    found = [_follows(place, then, now) for place in then[0].parts["gradients"]]
    return "one" in found and "mean" not in found


def _follows(place: str, before: Sequence[Check], after: Sequence[Check]) -> str:
    """Returns whether a parameter's first step shows a multiple of ``one`` rank's gradient, of the ``mean``, or "".

    A gradient of one number is a multiple of any, and those of ranks may be of one another: they show nothing.
    """
    gradients = [check.parts["gradients"].get(place) for check in before]
    known = [gradient for gradient in gradients if gradient is not None]
    if len(known) < len(before) or len({gradient.elements for gradient in known}) > 1:
        return ""
    shown: list[tuple[Kept, Kept | None, float]] = [
        (kept, None, CLOSE) for kept in _held_by_one(place, after, known[0].elements)
    ]
    old, new = (check.parts.get("parameters", {}).get(place) for check in (before[0], after[0]))
    if old is not None and new is not None:
        shown.append((new, old, MOVED))
    for kept, origin, close in shown:
        most = min(len(each.numbers) for each in (*known, kept, origin or kept))
        step = kept.thinned(most).astype(np.float64) - (0 if origin is None else origin.thinned(most))
        own = np.asarray([gradient.thinned(most) for gradient in known], np.float64)
        if _multiple(own.mean(axis=0), step, close):
            return "mean" if not any(_multiple(mine, step, close) for mine in own) else ""
        if any(_multiple(mine, step, close) for mine in own):
            return "one"
    return ""


def _held_by_one(place: str, after: Sequence[Check], elements: int) -> list[Kept]:
    """Returns the moments of a parameter, of its size, if one rank alone keeps any."""
    each = [{k: kept for k, kept in c.parts.get("moments", {}).items() if k.startswith(f"{place}.")} for c in after]
    having = [moments for moments in each if moments]
    return [kept for kept in having[0].values() if kept.elements == elements] if len(having) == 1 else []


def sums_seen(evidence: Evidence) -> bool:
    """Returns whether it is known of every optimiser if its gradients are averaged or summed (DDP and FSDP average)."""
    wrapped = all(set(trace.names[o]) == trace.wrapped[o] for trace in evidence.traces for o in trace.names)
    return (bool(evidence.wrappers) and wrapped) or all(any(counts) for counts in _judged(evidence).values())


def _judged(evidence: Evidence) -> dict[int, tuple[int, int, int]]:
    """Counts, by optimiser, the steps with gradients that were the ranks' mean, their sum, or divided twice."""
    ranks = len(evidence.traces)
    out = {}
    for optimizer in evidence.optimizers:
        moments = _reduced(evidence, optimizer)
        samples = [_samples(evidence.traces, moment) for moment in moments]
        found = [_multiple(np.mean(own, axis=0), stepped) for own, stepped in filter(None, samples)]
        if moments:
            sizes = (1, ranks, 1 / ranks)
            mean, total, twice = (sum(abs(x / size - 1) < CLOSE for x in found if x is not None) for size in sizes)
            out[optimizer] = (mean, total, twice)
    return out


def _reduced(evidence: Evidence, optimizer: int) -> list[Moment]:
    """Returns the moments at which an optimiser's gradients were equal on all ranks, but not their data."""
    alike = (c for c in evidence.of("gradients") if c.equal and c.nonzero and evidence.inputs[c.moment] == "differ")
    return [c.moment for c in alike if c.moment.optimizer == optimizer]


def _samples(traces: Sequence[RankTrace], moment: Moment) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns samples of the ranks' own gradients ``[ranks, n]`` and of what the step was given ``[n]``, in float64.

    Gradients that are equal on all ranks are left out: the script's own hooks have reduced them within ``backward``.
    None if nothing is left.
    """
    parts = [trace.checks[moment].parts for trace in traces]
    if not all("own" in part and "stepped" in part for part in parts):
        return None
    own, stepped = [], []
    for place, kept in parts[0]["stepped"].items():
        each = [part["own"][place].numbers for part in parts if place in part["own"]]
        if len(each) != len(parts) or all(np.array_equal(numbers, each[0]) for numbers in each):
            continue
        if all(numbers.shape == kept.numbers.shape for numbers in each):
            own.append(np.asarray(each, np.float64))
            stepped.append(kept.numbers.astype(np.float64))
    return (np.concatenate(own, axis=1), np.concatenate(stepped)) if own else None


def _multiple(of: np.ndarray, stepped: np.ndarray, close: float = CLOSE) -> float | None:
    """Returns the factor between a gradient and the stepped one; None if they aren't multiples, or not finite."""
    size = float(of @ of)
    if not (np.isfinite(size) and size > 0 and np.isfinite(stepped).all()):
        return None
    multiple = float(of @ stepped) / size
    off = np.linalg.norm(stepped - multiple * of)
    return multiple if off <= close * np.linalg.norm(stepped) else None


def _whose(traces: Sequence[RankTrace], own: np.ndarray, stepped: np.ndarray) -> int | None:
    """Returns the rank of whose gradient the stepped one is a multiple, if no other rank's gradient is 0; else None."""
    if not own.any(axis=1).all():
        return None
    found = [trace.rank for trace, mine in zip(traces, own, strict=True) if _multiple(mine, stepped)]
    return found[0] if len(found) == 1 else None
