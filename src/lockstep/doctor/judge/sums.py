"""Tells gradients that are summed over ranks from those that are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.doctor.judge.advice import FIXES
from lockstep.doctor.judge.evidence import NOTE, Evidence, Finding, of_optimizer
from lockstep.doctor.judge.traces import Kept, Moment, Part, RankTrace

CLOSE = 1e-3
"""The largest relative deviation that is taken for rounding."""


def summed_finding(evidence: Evidence) -> Finding | None:
    """Notes gradients that are ``ranks`` times the ranks' mean, so their sum.

    Steps whose gradients were clipped afterwards show another multiple and don't count. Whether the loss was divided
    beforehand, which would make a sum right, can't be seen.
    """
    ranks = len(evidence.traces)
    for optimizer, (averaged, steps) in _judged(evidence).items():
        if steps and not averaged:
            text = f"gradients{of_optimizer(evidence, optimizer)} are the sum over ranks, {ranks} times their mean: "
            text += "right if the loss is divided by the number of ranks; if not, every step depends on that number"
            return Finding("summed", NOTE, text, "", FIXES["summed"], {"optimizer": optimizer, "steps": steps})
    return None


def sums_seen(evidence: Evidence) -> bool:
    """Returns whether it is known of every optimiser if its gradients are averaged or summed (DDP and FSDP average)."""
    wrapped = all(set(trace.names[o]) == trace.wrapped[o] for trace in evidence.traces for o in trace.names)
    return (bool(evidence.wrappers) and wrapped) or all(any(counts) for counts in _judged(evidence).values())


def _judged(evidence: Evidence) -> dict[int, tuple[int, int]]:
    """Counts, by optimiser, the steps at which reduced gradients were the ranks' mean, and those with their sum."""
    ranks = len(evidence.traces)
    reduced = [c for c in evidence.of("gradients") if c.equal and c.nonzero and evidence.inputs[c.moment] == "differ"]
    out = {}
    for optimizer in evidence.optimizers:
        moments = [c.moment for c in reduced if c.moment.optimizer == optimizer]
        found = [x for moment in moments if (x := _multiple(evidence.traces, moment)) is not None]
        if moments:
            mean, total = (sum(1 for x in found if abs(x / size - 1) < CLOSE) for size in (1, ranks))
            out[optimizer] = (mean, total)
    return out


def _multiple(traces: Sequence[RankTrace], moment: Moment) -> float | None:
    """Returns the factor between the ranks' mean gradient and the stepped one; None if unseen or changed otherwise."""
    parts = [trace.checks[moment].parts for trace in traces]
    if not all("own" in part and "stepped" in part for part in parts):
        return None
    pairs = list(_pairs([part["own"] for part in parts], parts[0]["stepped"]))
    if not pairs:
        return None
    mean, stepped = (np.concatenate(each) for each in zip(*pairs, strict=True))
    size = float(mean @ mean)
    if not (np.isfinite(size) and size > 0 and np.isfinite(stepped).all()):
        return None
    multiple = float(mean @ stepped) / size
    off = np.linalg.norm(stepped - multiple * mean)
    return multiple if off <= CLOSE * np.linalg.norm(stepped) else None


def _pairs(own: Sequence[Part], stepped: Mapping[str, Kept]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, for each gradient that every rank has, the ranks' mean and what the step was given.

    Gradients that are equal on all ranks are left out: the script's own hooks have reduced them within ``backward``.
    """
    for place, kept in stepped.items():
        each = [part[place].numbers for part in own if place in part]
        if len(each) != len(own) or all(np.array_equal(numbers, each[0]) for numbers in each):
            continue
        if all(numbers.shape == kept.numbers.shape for numbers in each):
            yield np.mean(np.asarray(each, np.float64), axis=0), kept.numbers.astype(np.float64)
