"""Finds what is wrong with the script in what its optimisers' steps recorded."""

from __future__ import annotations

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import (
    Comparison,
    collected_at,
    first_rate_difference,
    ranks_alike,
    rate_at,
    rows_in_common,
    told,
)
from lockstep.doctor.judge.evidence import (
    DOUBT,
    NOTE,
    Evidence,
    Finding,
    difference,
    fault,
    figures,
    listed,
    of_optimizer,
)

ROUNDING = 1e-4
FEWEST_ROWS = 4
"""Fewer rows in common may be what a sampler adds, so that each rank has equally many."""


# --- tensors ----------------------------------------------------------------------------------------------------


def gradient_finding(evidence: Evidence) -> Finding | None:
    """Finds gradients that differ before a step and that the step doesn't reduce."""
    unequal = [c for c in evidence.of("gradients") if c.differing]
    unreduced = [c for c in unequal if not evidence.reduced_in_step(c.moment.optimizer)]
    found = min(unreduced, key=lambda c: c.moment.step, default=None)
    if found is None:
        return None
    advice, what = _why(evidence, found)
    return fault("gradients", f"{what}: {difference(evidence, found)}", advice, figures(found) | {"why": advice})


def _why(evidence: Evidence, found: Comparison) -> tuple[str, str]:
    """Returns why gradients differ, as a word of the advice, and the text for it."""
    own, ddp, never = found.moment.optimizer, "ddp" in evidence.wrappers, "gradients are never reduced"
    some = "some gradients are never reduced"
    equal = [c for c in evidence.of("gradients") if c.moment.optimizer == own and c.equal and c.nonzero]
    checks = [check for t in evidence.traces for moment, check in t.checks.items() if moment.optimizer == own]
    through = {wrapper for check in checks for wrapper in check.facts.get("through", ())}
    others = any(evidence.reduced(other) for other in evidence.optimizers if other != own)
    differing = set(found.differing)
    if differing & _required_by_some(evidence, found):
        return "required", "some gradients are there on some ranks only"
    if found.relative < ROUNDING:
        return "rounding", "gradients are reduced but rounded differently"
    if (
        ddp
        and differing <= _outside_ddp(evidence, own)
        and (others or len(differing) < found.compared or "ddp" in through)
    ):
        return "outside_ddp", some
    if not ddp and evidence.wrappers:
        return "outside_fsdp", some
    if others and not evidence.wrappers:
        return "others_reduced", some
    if len(differing) < found.compared:
        return ("partly_reduced" if evidence.wrappers else "skipped"), some
    if ddp and "ddp" not in through:
        return ("bypassed_sb3" if "stable_baselines3" in evidence.libraries else "bypassed"), never
    if ddp:
        return (
            "local_change",
            "gradients are not reduced at every step" if equal else "gradients differ in spite of DDP",
        )
    if equal:
        return "sometimes", "gradients are not reduced at every step"
    return ("unreduced_sb3" if "stable_baselines3" in evidence.libraries else "unreduced"), never


def _required_by_some(evidence: Evidence, found: Comparison) -> set[str]:
    """Returns the names of parameters that require gradients on some ranks only, at a comparison's moment."""
    fixed = []
    for trace in evidence.traces:
        names = trace.names.get(found.moment.optimizer, {})
        fixed.append({told(place, names) for place in trace.checks[found.moment].facts.get("fixed", ())})
    return set.union(*fixed) - set.intersection(*fixed)


def _outside_ddp(evidence: Evidence, optimizer: int) -> set[str]:
    """Returns the names of an optimiser's parameters that no module in DDP holds."""
    first = evidence.traces[0]
    names, wrapped = first.names.get(optimizer, {}), first.wrapped.get(optimizer, set())
    return {told(place, names) for place in names if place not in wrapped}


def start_finding(evidence: Evidence) -> Finding | None:
    """Finds parameters that differ before the first step."""
    if (found := evidence.first_difference("parameters", "before")) is None:
        return None
    text = f"parameters differ before the first step: {difference(evidence, found).replace(' from ', ' before ')}"
    return fault("start", text, "start", figures(found))


def rate_finding(evidence: Evidence) -> Finding | None:
    """Finds learning rates that differ before ranks took different numbers of steps."""
    for optimizer in evidence.optimizers:
        step = first_rate_difference(evidence.traces, optimizer, evidence.parted)
        if step is not None:
            rates = {t.rank: rate_at(t, optimizer, step) for t in evidence.traces if t.rates.get(optimizer)}
            said = ", ".join(f"{'/'.join(map(_said, rate))} (rank {rank})" for rank, rate in rates.items())
            text = f"learning rates differ between ranks from optimiser step {step + 1}: {said}"
            after = evidence.first_difference("parameters", "after")
            if after is not None:
                text += f"; parameters of {difference(evidence, after)}"
            return fault("learning_rate", text, "rates", {"step": step + 1, "rates": rates})
    return None


def _said(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.3g}"


def parameter_finding(evidence: Evidence) -> Finding | None:
    """Finds parameters or moments that differ although gradients, start and settings are equal, or weren't seen.

    An optimiser that compresses what it sends keeps what it hasn't sent, which is each rank's own.
    """
    changed = "diverged" if evidence.of("gradients") else "gradients_unseen"
    for kind, advice in (("parameters", changed), ("moments", "moments")):
        found = evidence.first_difference(kind, "after")
        if found is not None and kind == "moments" and evidence.reduced_in_step(found.moment.optimizer):
            text = "state of an optimiser that reduces gradients itself differs, and parameters stay equal: "
            text += difference(evidence, found)
            return Finding("own_state", DOUBT, text, CAUSES["own_state"], FIXES["own_state"], figures(found))
        if found is not None:
            return fault(kind, f"{kind} differ: {difference(evidence, found)}", advice, figures(found))
    return _end_finding(evidence)


def _end_finding(evidence: Evidence) -> Finding | None:
    """Finds parameters or moments that differ at the script's end but at no compared step.

    If the very last step was compared, training isn't affected, and the finding is only a note.
    """
    found = evidence.first_difference("parameters", "end") or evidence.first_difference("moments", "end")
    if found is None:
        return None
    steps = {c.moment.step for c in evidence.of(found.kind, "after") if c.moment.optimizer == found.moment.optimizer}
    last, taken = max(steps, default=0), found.moment.step
    text = f"{found.kind} differ though they were equal after step {last}, the last compared one of {taken}: "
    level = NOTE if last == taken else DOUBT
    return Finding("end", level, text + difference(evidence, found), CAUSES["end"], FIXES["end"], figures(found))


# --- data -----------------------------------------------------------------------------------------------------


def data_finding(evidence: Evidence) -> Finding | None:
    """Finds an optimiser whose data are the same on every rank, or on some, at every compared step.

    Ranks that share a model's parts may rightly share data.
    """
    for optimizer in evidence.optimizers:
        words = {moment: word for moment, word in evidence.inputs.items() if moment.optimizer == optimizer}
        seen, where = [word for word in words.values() if word != "unseen"], "every rank"
        if not seen:
            continue
        if "differ" in seen:
            some = ranks_alike(evidence.traces, list(words))
            parts = any(c.sharded for c in evidence.compared if c.moment.optimizer == optimizer)
            if parts or not 1 < len(some) < len(evidence.traces):
                continue
            where = listed(some)
        text = f"the data{of_optimizer(evidence, optimizer)} are identical on {where}: inputs of the forward passes"
        text += f" before all {len(seen)} compared steps"
        return Finding("identical_data", DOUBT, text, CAUSES["data"], FIXES["data"], {"steps": len(seen)})
    return None


def rollout_finding(evidence: Evidence) -> Finding | None:
    """Finds rollouts that are the same on every rank, though each takes its minibatches in an order of its own.

    If ranks share one rollout and each trains on its own part of it, they have no rows in common: rows that a rollout
    has more than once, as a grid's few states, don't count.
    """
    for optimizer in evidence.optimizers:
        moments = [m for m in evidence.inputs if m.optimizer == optimizer]
        seen = {m: word for m in moments if (word := collected_at(evidence.traces, m)) != "unseen"}
        if not seen or "differ" in seen.values() or not evidence.reduced(optimizer):
            continue
        if rows_in_common(evidence.traces, list(seen)) >= FEWEST_ROWS:
            text = f"the data{of_optimizer(evidence, optimizer)} are identical on every rank, only in another order: "
            text += f"all that the rollouts before {len(seen)} compared steps gave to the models"
            return Finding("identical_data", DOUBT, text, CAUSES["data"], FIXES["data"], {"steps": len(seen)})
    return None


def no_evidence_finding(evidence: Evidence) -> Finding | None:
    """Finds why it can't be told whether gradients are reduced, if no other finding says so."""
    if not any(steps for trace in evidence.traces for steps in trace.steps.values()):
        compiled = any(trace.state.get("compiled") for trace in evidence.traces)
        why = "no_steps_compiled" if compiled else "no_steps"
        return Finding("no_steps", DOUBT, "no optimiser step was seen", CAUSES[why], FIXES.get(why, ""))
    found = (_unproved(evidence, optimizer) for optimizer in evidence.optimizers)
    return next((finding for finding in found if finding is not None), None)


def _unproved(evidence: Evidence, optimizer: int) -> Finding | None:
    """Finds why it can't be told of one optimiser; None if it can, or if gradients differ or data are equal."""
    gradients = [c for c in evidence.of("gradients") if c.moment.optimizer == optimizer]
    whose = of_optimizer(evidence, optimizer)
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
        return None  # data_finding reports it
    text = f"gradients{whose} are equal on all ranks, but are zero wherever the data differ: whether they are reduced "
    return Finding("inputs_unseen", DOUBT, text + "can't be told")


def step_reduction_finding(evidence: Evidence) -> Finding | None:
    """Notes that an optimiser reduces gradients itself, unless all data are equal: then it may be blind to scales."""
    other = {moment.optimizer for moment, word in evidence.inputs.items() if word != "equal"}
    if not any(evidence.reduced_in_step(optimizer) for optimizer in other):
        return None
    text = "gradients differ before the optimiser step and parameters are equal after it: the optimiser reduces them; "
    return Finding("reduced_in_step", NOTE, text + "what the script clips are gradients of each rank's own")


def sharded_finding(evidence: Evidence) -> Finding | None:
    """Finds sharded parameters that differ once gathered; if none do, notes what of them was compared."""
    sharded = [c for c in evidence.of("parameters") if c.sharded]
    if not sharded and "fsdp1" not in evidence.wrappers:
        return None
    gathered, by_parts = evidence.of("gathered"), set().union(*(trace.by_parts for trace in evidence.traces))
    unlike = next((c for c in gathered if c.differing), None)
    if unlike is not None:
        text = f"gathered parameters differ: {difference(evidence, unlike)}"
        advice = "diverged"
        if unlike.moment.optimizer in by_parts:
            advice = "start" if unlike.moment.step == 1 else "parts"
        return fault("gathered", text, advice, figures(unlike))
    count = max((c.sharded for c in sharded), default=0)
    text = f"{count} of the parameters are sharded over the ranks, each shard on one: "
    if by_parts:
        text = "each rank's optimiser holds a part of the model's parameters: "
    times = sum(1 for c in gathered if c.equal)
    seen = f"compared as forward passes gathered them, at {times} steps, and by step counts and learning rates"
    text += seen if times else "compared by step counts and learning rates alone"
    return Finding("sharded", NOTE, text + "; shards of gradients and moments were not checked")
