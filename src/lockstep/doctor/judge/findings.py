"""Finds what is wrong with the script in what ranks left, the worst first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import (
    Comparison,
    comparisons,
    first_rate_difference,
    inputs_at,
    phase_lengths,
    rate_at,
    same,
    shared_moments,
    told,
    uneven_phase,
)
from lockstep.doctor.judge.traces import Moment, RankTrace

FAULT, DOUBT, NOTE = "fault", "doubt", "note"
ROUNDING = 1e-4


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
    """All comparisons, sorted for the questions that are asked of them."""

    traces: Sequence[RankTrace]
    compared: list[Comparison]
    inputs: dict[Moment, str]

    def of(self, kind: str, when: str | None = None) -> list[Comparison]:
        """Comparisons of one kind of tensors."""
        return [c for c in self.compared if c.kind == kind and when in (None, c.moment.when)]

    def first_difference(self, kind: str, when: str | None = None) -> Comparison | None:
        """The earliest step at which tensors of a kind differ."""
        unequal = [c for c in self.of(kind, when) if c.differing]
        return min(unequal, key=lambda c: c.moment.step, default=None)

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
    return Evidence(traces, list(comparisons(traces)), inputs)


def listed(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0 and 1``, ``ranks 0, 1 and 2``."""
    words = [str(rank) for rank in ranks]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(words) > 1 else ''} {text}"


def _difference(evidence: Evidence, c: Comparison) -> str:
    """``ranks 0 and 1 differ from optimiser step 1 in 12 of 12 tensors, first …, largest relative difference …``."""
    who = listed([min(t.rank for t in evidence.traces), *c.ranks])
    optimizer = _of_optimizer(evidence, c.moment.optimizer)
    since = f"from optimiser step {c.moment.step}{optimizer}" if c.moment.when != "end" else "at the end"
    size = "" if not math.isfinite(c.relative) else f", largest relative difference {c.relative:.1e}"
    return f"{who} differ {since} in {len(c.differing)} of {c.compared} tensors, first {c.differing[0]}{size}"


def _figures(c: Comparison) -> dict[str, Any]:
    relative = c.relative if math.isfinite(c.relative) else None
    figures = {"step": c.moment.step, "optimizer": c.moment.optimizer, "ranks": list(c.ranks)}
    return figures | {"tensors": list(c.differing), "of": c.compared, "largest_relative_difference": relative}


def _finding(kind: str, text: str, advice: str, details: dict[str, Any] | None = None) -> Finding:
    return Finding(kind, FAULT, text, CAUSES[advice], FIXES[advice], details or {})


# --- tensors ----------------------------------------------------------------------------------------------------


def gradient_finding(evidence: Evidence) -> Finding | None:
    """Gradients that differ before the step, and aren't reduced by it."""
    unequal = [c for c in evidence.of("gradients") if c.differing]
    unreduced = [c for c in unequal if not evidence.reduced_in_step(c.moment.optimizer)]
    found = min(unreduced, key=lambda c: c.moment.step, default=None)
    if found is None:
        return None
    own = found.moment.optimizer
    equal = [c for c in evidence.of("gradients") if c.moment.optimizer == own and c.equal and c.nonzero]
    checks = [check for t in evidence.traces for moment, check in t.checks.items() if moment.optimizer == own]
    through = {wrapper for check in checks for wrapper in check.facts.get("through", ())}
    if found.relative < ROUNDING:
        advice, what = "rounding", "gradients are reduced but rounded differently"
    elif any(evidence.reduced(other) for other in evidence.optimizers if other != own) and not evidence.wrappers:
        advice, what = "others_reduced", "some gradients are never reduced"
    elif len(found.differing) < found.compared:
        advice, what = "partly_reduced", "some gradients are never reduced"
    elif "ddp" in evidence.wrappers and "ddp" not in through:
        advice = "bypassed_sb3" if "stable_baselines3" in evidence.libraries else "bypassed"
        what = "gradients are never reduced"
    else:
        advice = "local_change" if "ddp" in evidence.wrappers else "unreduced"
        never = "gradients differ in spite of DDP" if advice == "local_change" else "gradients are never reduced"
        what = "gradients are not reduced at every step" if equal else never
    return _finding("gradients", f"{what}: {_difference(evidence, found)}", advice, _figures(found) | {"why": advice})


def start_finding(evidence: Evidence) -> Finding | None:
    """Parameters that differ before the first step."""
    if (found := evidence.first_difference("parameters", "before")) is None:
        return None
    text = f"parameters differ before the first step: {_difference(evidence, found).replace(' from ', ' before ')}"
    return _finding("start", text, "start", _figures(found))


def rate_finding(evidence: Evidence) -> Finding | None:
    """Learning rates that differ."""
    for optimizer in evidence.optimizers:
        step = first_rate_difference(evidence.traces, optimizer)
        if step is not None:
            rates = {t.rank: rate_at(t, optimizer, step) for t in evidence.traces}
            said = ", ".join(f"{'/'.join(f'{r:.3g}' for r in rate)} (rank {rank})" for rank, rate in rates.items())
            text = f"learning rates differ between ranks from optimiser step {step + 1}: {said}"
            after = evidence.first_difference("parameters", "after")
            if after is not None:
                text += f"; parameters of {_difference(evidence, after)}"
            return _finding("learning_rate", text, "rates", {"step": step + 1, "rates": rates})
    return None


def parameter_finding(evidence: Evidence) -> Finding | None:
    """Parameters or moments that differ though what leads to them doesn't."""
    for kind, advice in (("parameters", "diverged"), ("moments", "moments")):
        found = evidence.first_difference(kind)
        if found is not None:
            return _finding(kind, f"{kind} differ: {_difference(evidence, found)}", advice, _figures(found))
    return None


def normalizer_finding(evidence: Evidence) -> Finding | None:
    """Running statistics of observations or rewards that differ."""
    if (found := evidence.first_difference("normalizers")) is None:
        return None
    text = f"normalisers drift apart: statistics of {_difference(evidence, found)}"
    return _finding("normalizers", text, "normalizers", _figures(found))


def buffer_finding(evidence: Evidence) -> Finding | None:
    """Buffers that differ: a fault, unless DDP replaces them by rank 0's before each forward pass."""
    unequal = [c for c in evidence.of("buffers") if c.differing]
    if not unequal:
        return None
    checks = [c for trace in evidence.traces for moment, c in trace.checks.items() if moment.when == "after"]
    sent = {name for check in checks for name in check.facts.get("broadcast", ())}
    works = evidence.first_difference("gradients") is None  # and so DDP's forward is used
    own = [c for c in unequal if not (works and set(c.differing) <= sent)]
    if own:
        text = f"buffers drift apart: {_difference(evidence, own[0])}"
        return _finding("buffers", text, "buffers", _figures(own[0]))
    text = f"buffers are rank 0's: DDP replaces them before each forward pass ({len(unequal[0].differing)} tensors, "
    text += f"first {unequal[0].differing[0]}), so that what other ranks' data add to them is lost"
    return Finding("ddp_buffers", NOTE, text, "", FIXES["buffers"], _figures(unequal[0]))


# --- steps and data -----------------------------------------------------------------------------------------------


def step_finding(evidence: Evidence) -> Finding | None:
    """Different numbers of optimiser steps, within a phase or in all."""
    traces = evidence.traces
    for optimizer in evidence.optimizers:
        phase = uneven_phase(traces, optimizer)
        if phase is not None:
            counts = {t.rank: phase_lengths(t.boundaries[optimizer])[phase] for t in traces}
            said = ", ".join(f"{count} (rank {rank})" for rank, count in counts.items())
            text = f"ranks take different numbers of optimiser steps: {said} in rollout phase {phase + 1}"
            if not any(c.differing for c in evidence.of("parameters")):
                text += ", while their parameters stay equal"
            return _finding("steps", text, "steps", {"phase": phase + 1, "steps": counts})
        totals = {t.rank: t.steps.get(optimizer, 0) for t in traces}
        if len(set(totals.values())) > 1 and all(t.finished for t in traces):
            said = ", ".join(f"{count} (rank {rank})" for rank, count in totals.items())
            text = f"ranks take different numbers of optimiser steps: {said} in all"
            return _finding("steps", text, "steps", {"steps": totals})
    return None


def _of_optimizer(evidence: Evidence, optimizer: int) -> str:
    """Names an optimiser by the order of their first steps, from 1; nothing if it is the only one."""
    return f" of optimiser {optimizer + 1}" if len(evidence.optimizers) > 1 else ""


def data_finding(evidence: Evidence) -> Finding | None:
    """Data of an optimiser that are the same on every rank at every compared step."""
    for optimizer in evidence.optimizers:
        words = [word for moment, word in evidence.inputs.items() if moment.optimizer == optimizer]
        seen = [word for word in words if word != "unseen"]
        if not seen or "differ" in seen or evidence.reduced(optimizer):
            continue
        text = f"the data{_of_optimizer(evidence, optimizer)} are identical on every rank: inputs of the forward passes"
        text += f" before all {len(seen)} compared steps"
        return Finding("identical_data", DOUBT, text, CAUSES["data"], FIXES["data"], {"steps": len(seen)})
    return None


def no_evidence_finding(evidence: Evidence) -> Finding | None:
    """Finds why it can't be said that gradients are reduced, where none of the others says it."""
    if not any(steps for trace in evidence.traces for steps in trace.steps.values()):
        return Finding("no_steps", DOUBT, "no optimiser step was seen", "the script doesn't train with a torch.optim "
                       "optimiser in the ranks' own processes, or ended before its first step")  # fmt: skip
    found = (_unproved(evidence, optimizer) for optimizer in evidence.optimizers)
    return next((finding for finding in found if finding is not None), None)


def _unproved(evidence: Evidence, optimizer: int) -> Finding | None:
    """Finds why it can't be said of one optimiser; None if it can, or if gradients differ or data are equal."""
    gradients = [c for c in evidence.of("gradients") if c.moment.optimizer == optimizer]
    whose = _of_optimizer(evidence, optimizer)
    words = {word for moment, word in evidence.inputs.items() if moment.optimizer == optimizer}
    if evidence.reduced(optimizer) or any(c.differing for c in gradients):
        return None
    if not gradients:
        return Finding("not_compared", DOUBT, f"no step{whose or ' of the optimiser'} was seen on every rank")
    if any(c.sharded for c in gradients) and not any(c.compared for c in gradients):
        if any(c.equal and c.moment.optimizer == optimizer for c in evidence.of("gathered")):
            return None
        return Finding("sharded_unseen", DOUBT, f"all parameters{whose} are sharded, and were never seen gathered: "
                       "there was nothing to compare")  # fmt: skip
    if all(not c.nonzero for c in gradients):
        return Finding("no_gradients", DOUBT, f"no gradient{whose} but zero was seen before any compared step")
    if words == {"unseen"}:
        text = f"gradients{whose} are equal on all ranks, but no forward pass of a module was seen: whether their data "
        return Finding("inputs_unseen", DOUBT, text + "differ, and so whether gradients are reduced, can't be told")
    if "differ" not in words:
        return None  # the data's own finding
    text = f"gradients{whose} are equal on all ranks, but are zero wherever the data differ: whether they are reduced "
    return Finding("inputs_unseen", DOUBT, text + "can't be told")


def step_reduction_finding(evidence: Evidence) -> Finding | None:
    """Optimisers that reduce gradients themselves."""
    own = [o for o in evidence.optimizers if evidence.reduced_in_step(o)]
    if not own:
        return None
    text = "gradients differ before the optimiser step and parameters are equal after it: the optimiser reduces them; "
    return Finding("reduced_in_step", NOTE, text + "what the script clips are gradients of each rank's own")


def sharded_finding(evidence: Evidence) -> Finding | None:
    """Tells what was compared of parameters of which each rank holds another part."""
    sharded = [c for c in evidence.of("parameters") if c.sharded]
    if not sharded and "fsdp1" not in evidence.wrappers:
        return None
    gathered = evidence.of("gathered")
    unlike = next((c for c in gathered if c.differing), None)
    if unlike is not None:
        text = f"gathered parameters differ: {_difference(evidence, unlike)}"
        return _finding("gathered", text, "diverged", _figures(unlike))
    count = max((c.sharded for c in sharded), default=0)
    text = f"{count} of the parameters are sharded over the ranks, each shard on one: "
    times = sum(1 for c in gathered if c.equal)
    seen = f"compared as forward passes gathered them, at {times} steps, and by step counts and learning rates"
    text += seen if times else "compared by step counts and learning rates alone"
    return Finding("sharded", NOTE, text + "; shards of gradients and moments were not checked")
