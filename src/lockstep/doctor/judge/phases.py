"""Finds ranks that take different numbers of optimiser steps, and tells them from ranks that only look in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import first_rate_difference
from lockstep.doctor.judge.evidence import DOUBT, NOTE, Evidence, Finding, fault, listed, of_optimizer
from lockstep.doctor.judge.traces import RankTrace

MOST_EXTRA = 2
"""A rank's additional phases count as evaluations if each other rank has at least this many times as many phases."""

TRAINED_ON = {
    True: ", and train on what they were given",
    None: ", and whether they train on what they were given wasn't seen",
    False: "",
}


def step_finding(evidence: Evidence, cut: bool) -> Finding | None:
    """Finds different numbers of optimiser steps, within a phase or in all; ``cut``: ranks were stopped or failed."""
    traces = evidence.traces
    for optimizer in evidence.optimizers:
        phase, whose = uneven_phase(traces, optimizer), of_optimizer(evidence, optimizer)
        explained = _who_looks_in_between(evidence, optimizer, cut) is not None or _looks_vary(evidence, optimizer, cut)
        if phase is not None and not explained:
            lengths = {t.rank: phase_lengths(t.boundaries[optimizer]) for t in traces}
            counts = {rank: each[phase] for rank, each in lengths.items()}
            before = sum(lengths[traces[0].rank][:phase])
            said = ", ".join(f"{count} (rank {rank})" for rank, count in counts.items())
            text = f"ranks take different numbers of optimiser steps{whose}: {said} in rollout phase {phase + 1}"
            if not any(c.differing for c in evidence.of("parameters")):
                text += ", while their parameters stay equal"
            return fault("steps", text, "steps", {"phase": phase + 1, "steps": counts, "before": before})
        totals = {t.rank: t.steps.get(optimizer, 0) for t in traces}
        if len(set(totals.values())) > 1 and all(t.finished for t in traces):
            said = ", ".join(f"{count} (rank {rank})" for rank, count in totals.items())
            text = f"ranks take different numbers of optimiser steps{whose}: {said} in all"
            return fault("steps", text, "steps" if all(totals.values()) else "steps_alone", {"steps": totals})
    return None


def _who_looks_in_between(evidence: Evidence, optimizer: int, cut: bool) -> int | None:
    """Returns the rank with additional phases, if all ranks took equally many steps or were ``cut`` short; else None.

    If ranks ended their epochs by their own values instead, one would have taken fewer steps in the end, or waited.
    """
    return rank_with_more_phases(evidence.traces, optimizer) if cut or _equally_many(evidence, optimizer) else None


def _equally_many(evidence: Evidence, optimizer: int) -> bool:
    """Returns whether all ranks came to their end after the same number of an optimiser's steps."""
    traces = evidence.traces
    return len({trace.steps.get(optimizer, 0) for trace in traces}) == 1 and all(trace.finished for trace in traces)


def _looks_vary(evidence: Evidence, optimizer: int, cut: bool) -> bool:
    """Returns whether different phases explain nothing: ranks took equally many steps, or were ``cut`` short.

    If gradients agree and parameters or learning rates don't, they explain that. If ranks that were ``cut`` short
    trained on what they collected in phases of their own, they would have taken different numbers of steps.
    """
    gradients, parameters = (any(c.differing for c in evidence.of(kind)) for kind in ("gradients", "parameters"))
    agree = not parameters and first_rate_difference(evidence.traces, optimizer) is None
    apart = not _equally_many(evidence, optimizer)
    return (gradients or agree) and not (apart and (not cut or _learned_from_own_phase(evidence, optimizer)))


def _learned_from_own_phase(evidence: Evidence, optimizer: int) -> bool | None:
    """Returns whether a rank was seen to train on what it collected in a phase that other ranks didn't begin then.

    None if that can't be told: some rank was never seen to train on what it collected (it changes that before, or
    collects nothing), or its own phases aren't rare and no step just after one was compared.
    """
    began = [set(trace.boundaries.get(optimizer, [])) for trace in evidence.traces]
    shared, told = set.intersection(*began), True
    for trace, mine in zip(evidence.traces, began, strict=True):
        before = {m.step: c for m, c in trace.checks.items() if m.optimizer == optimizer and m.when == "before"}
        collected = [step for step, check in before.items() if check.facts.get("rows")]
        begun = [max((number for number in mine if number < step), default=None) for step in collected]
        if any(number is not None and number not in shared for number in begun):
            return True
        own = mine - shared
        seen = MOST_EXTRA * len(own) <= len(shared) or any(number + 1 in before for number in own)
        told = told and bool(collected) and seen
    return False if told else None


def phases_finding(evidence: Evidence, cut: bool) -> Finding | None:
    """Finds ranks that make forward passes without gradients between two steps, when others don't.

    It is a note if ranks came to their end and one rank makes all that others make and more, or if none was seen to
    train on what it collected in phases of its own, though ranks were seen to train on what they collect. Else they may
    end their epochs by their own values, and it is a doubt. If ranks were ``cut`` short (stopped or failed), this looks
    the same as a rank that always ends its epochs before the others do, so it is a doubt.
    """
    for optimizer in evidence.optimizers:
        if uneven_phase(evidence.traces, optimizer) is None:
            continue
        who = _who_looks_in_between(evidence, optimizer, cut)
        if who is not None:
            text = f"{listed([who])} makes forward passes without gradients within the others' rollout phases: "
            text += "an evaluation or a number for the log"
            return _phases(text, {"optimizer": optimizer, "rank": who}, "phases", cut=cut, doubtful=False)
        if _looks_vary(evidence, optimizer, cut):
            counts = {trace.rank: len(trace.boundaries.get(optimizer, [])) for trace in evidence.traces}
            said = ", ".join(f"{count} (rank {rank})" for rank, count in counts.items())
            text = f"ranks make forward passes without gradients between different optimiser steps, {said} times"
            own = _learned_from_own_phase(evidence, optimizer)
            text += " in all" + TRAINED_ON[own]
            details = {"optimizer": optimizer, "phases": counts}
            return _phases(text, details, "varying_phases", cut=cut, doubtful=own is not False)
    return None


def _phases(text: str, details: dict[str, Any], cause: str, *, cut: bool, doubtful: bool) -> Finding:
    if cut:
        text += ", as ranks were stopped, or failed, before they showed anything else"
        return Finding("phases", DOUBT, text, CAUSES[cause], FIXES["phases"], details)
    text += ", as ranks took equally many steps"
    if doubtful:
        return Finding("phases", DOUBT, text, CAUSES[cause], FIXES[cause], details)
    return Finding("phases", NOTE, text, "", "", details)


def phase_lengths(boundaries: Sequence[int]) -> list[int]:
    """Returns the steps per phase, from the numbers of steps taken at the phases' beginnings."""
    return [after - before for before, after in zip([0, *boundaries], boundaries, strict=False)]


def uneven_phase(traces: Sequence[RankTrace], optimizer: int) -> int | None:
    """Returns the first rollout phase (from 0) after which ranks had taken different numbers of steps, or None.

    A rank that evaluates between two steps has additional phases: its boundaries include all of the others', which is
    no difference if it is rare. A rank that always stops early may have an additional boundary in every phase of the
    others, which is a difference.
    """
    lists = [trace.boundaries.get(optimizer, []) for trace in traces]
    seen = _shared_boundaries(traces, optimizer)
    widest = max(seen, key=len)
    if all(other <= widest and MOST_EXTRA * len(widest - other) <= len(other) for other in seen):
        return None
    return next((phase for phase, steps in enumerate(zip(*lists, strict=False)) if len(set(steps)) > 1), None)


def rank_with_more_phases(traces: Sequence[RankTrace], optimizer: int) -> int | None:
    """Returns the rank whose boundaries include all other ranks' and more than some rank's, or None."""
    seen = _shared_boundaries(traces, optimizer)
    widest = max(seen, key=len)
    found = all(other <= widest for other in seen) and any(other < widest for other in seen)
    return traces[seen.index(widest)].rank if found else None


def _shared_boundaries(traces: Sequence[RankTrace], optimizer: int) -> list[set[int]]:
    """Returns each rank's numbers of steps at which a phase began, below the fewest steps of any rank."""
    taken = min(trace.steps.get(optimizer, 0) for trace in traces)
    return [{step for step in trace.boundaries.get(optimizer, []) if step < taken} for trace in traces]
