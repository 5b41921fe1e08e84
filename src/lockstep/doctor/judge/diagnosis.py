"""Collects all findings and draws the verdict from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.buffers import buffer_findings
from lockstep.doctor.judge.compare import OPTIMIZED
from lockstep.doctor.judge.drifts import normalizer_findings
from lockstep.doctor.judge.endings import (
    failure_finding,
    lost_finding,
    of_themselves,
    unheard_finding,
    waiting_finding,
)
from lockstep.doctor.judge.evidence import DOUBT, FAULT, NOTE, Evidence, Finding, gather_evidence
from lockstep.doctor.judge.findings import (
    data_finding,
    gradient_finding,
    no_evidence_finding,
    parameter_finding,
    rate_finding,
    rollout_finding,
    sharded_finding,
    start_finding,
    step_reduction_finding,
)
from lockstep.doctor.judge.matching import match_optimizers, without_lone_optimizers
from lockstep.doctor.judge.others import (
    blindness_finding,
    frozen_finding,
    loaded_finding,
    server_finding,
    settings_finding,
    stepping,
    unknown_finding,
    unmatched_finding,
    unstepped_finding,
)
from lockstep.doctor.judge.passing import passing_optimizers, set_aside
from lockstep.doctor.judge.phases import phases_finding, step_finding
from lockstep.doctor.judge.sums import (
    alone_finding,
    alone_in_step_finding,
    parts_alone_finding,
    summed_finding,
    sums_seen,
)
from lockstep.doctor.judge.traces import RankTrace

IN_SYNC, NOT_IN_SYNC, UNDETERMINED = "IN SYNC", "NOT IN SYNC", "UNDETERMINED"
CERTAIN = frozenset({"independent", "gradients", "start", "parameters", "frozen", "normalizers", "buffers", "gathered"})
"""Kinds of faults that are proved by what ranks wrote, even if some of it was lost."""
STATUS = {IN_SYNC: 0, NOT_IN_SYNC: 1, UNDETERMINED: 2}


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        verdict: ``IN SYNC``, ``NOT IN SYNC`` or ``UNDETERMINED``.
        reason: the text of the first fault or doubt; if there is none, what was seen to be equal.
        findings: faults, then doubts, then notes.
        coverage: what was compared: ranks, steps, tensors.
        overhead: the doctor's own seconds, the script's seconds, and the doctor's over the rest.
    """

    verdict: str
    reason: str
    findings: list[Finding]
    coverage: dict[str, Any]
    overhead: dict[str, float]

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON types."""
        findings = [asdict(finding) for finding in self.findings]
        head = {"verdict": self.verdict, "status": self.status, "reason": self.reason, "findings": findings}
        return head | {"coverage": self.coverage, "overhead": self.overhead}


def diagnose(
    traces: Sequence[RankTrace], *, deadlock: bool = False, interrupted: bool = False, stopped: bool = False
) -> Diagnosis:
    """Judges what the ranks recorded.

    Args:
        traces: one per rank.
        deadlock: whether the doctor ended the ranks because they only waited for one another.
        interrupted: whether a signal stopped the run.
        stopped: whether the run was ended at its time limit.
    """
    traces, lone = without_lone_optimizers(match_optimizers(traces))
    known = [trace for trace in traces if trace.state or trace.checks]
    evidence = gather_evidence(_one_agent(known)) if known else Evidence([RankTrace(0)], [], {})
    evidence, aside = set_aside(evidence, passing_optimizers(evidence.traces))
    findings = _findings(traces, evidence, deadlock, interrupted, interrupted or stopped) + _there([aside, lone])
    if (lost := lost_finding(traces)) is not None:
        findings = [lost, *(f if f.kind in CERTAIN else _doubted(f) for f in findings)]
    faults, doubts, notes = ([f for f in findings if f.level == level] for level in (FAULT, DOUBT, NOTE))
    verdict = NOT_IN_SYNC if faults else UNDETERMINED if doubts else IN_SYNC
    reason = (faults or doubts)[0].text if faults or doubts else _well(evidence)
    return Diagnosis(verdict, reason, [*faults, *doubts, *notes], _coverage(traces, evidence), _overhead(known))


def _findings(
    traces: Sequence[RankTrace], evidence: Evidence, deadlock: bool, interrupted: bool, stopped: bool
) -> list[Finding]:
    known = [trace for trace in traces if trace.state or trace.checks]
    failure = failure_finding(traces, interrupted, deadlock)
    endings = [waiting_finding(traces, deadlock), failure, unheard_finding(traces), blindness_finding(known)]
    if len(traces) == 1:
        text = "there is one rank, and nothing to compare it with; give --nproc 2"
        return [Finding("one_rank", DOUBT, text), *_there([failure])]
    independent = None if len(stepping(known)) == 1 else _independent_finding(evidence)
    if independent is not None:
        return [independent, *normalizer_findings(evidence), *_there(endings)]
    server = server_finding(known)
    if server is not None and len(stepping(known)) == 1:
        return _there([failure, server, *(e for e in endings if e is not failure), unknown_finding(evidence)])
    cut = stopped or bool(of_themselves(traces, deadlock))
    steps, start = step_finding(evidence, cut), start_finding(evidence)
    before = evidence.until(steps)  # after that, ranks pair different minibatches and can't be compared
    gradients, rates = gradient_finding(before), rate_finding(before)
    causes = [gradients, start, rates, settings_finding(evidence), loaded_finding(evidence)]
    found = [gradients, start, steps, *causes[2:]]
    if not _there(causes):  # any of these explains differing parameters
        found.append(parameter_finding(before))
    found += [frozen_finding(before), *normalizer_findings(before), *buffer_findings(before), *endings, server]
    found += [
        data_finding(evidence),
        rollout_finding(evidence),
        no_evidence_finding(evidence),
        unmatched_finding(evidence),
    ]
    found += [unstepped_finding(evidence)]
    found += [alone_in_step_finding(evidence) or step_reduction_finding(evidence)]
    found += [summed_finding(evidence), alone_finding(evidence)]
    found += [parts_alone_finding(evidence), phases_finding(evidence, cut)]
    sharded = sharded_finding(evidence)
    if sharded is not None and sharded.kind == "gathered" and gradients is not None:
        sharded = None  # what isn't sharded differs by its gradients, and was seen beside what was gathered
    return _there([*found, sharded, unknown_finding(evidence)])


def _one_agent(known: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """Returns the ranks to compare at their steps: all, or the learners alone if the others are actors.

    Ranks that take no steps are actors if they made no optimiser, or if their parameters were compared with the
    learners'. Otherwise they have left the loop and count.
    """
    learners, server = stepping(known), server_finding(known)
    if len(learners) < 2 or server is None:
        return known
    act = all(trace.acts for trace in known if trace not in learners)
    return learners if act or server.level != DOUBT else known


def _doubted(finding: Finding) -> Finding:
    """Turns a fault into a doubt: it rests on something missing, which may have been lost."""
    return replace(finding, level=DOUBT) if finding.level == FAULT else finding


def _there(findings: Sequence[Finding | None]) -> list[Finding]:
    return [finding for finding in findings if finding is not None]


def _independent_finding(evidence: Evidence) -> Finding | None:
    """Finds processes that train without a common process group and without any other reduction."""
    if evidence.joined > 1 or not any(evidence.traces[0].steps.values()):
        return None
    if any(evidence.reduced(optimizer) for optimizer in evidence.optimizers):
        return None
    what = "a process group of one rank each" if evidence.joined == 1 else "no torch.distributed process group"
    text = f"{len(evidence.traces)} ranks with {what}: each trains an agent of its own"
    fix = FIXES["bypassed_sb3" if "stable_baselines3" in evidence.libraries else "independent"]
    return Finding("independent", FAULT, text, CAUSES["independent"], fix)


def _steps_compared(evidence: Evidence) -> int:
    return len({(c.moment.optimizer, c.moment.step) for c in evidence.compared if c.moment.when == "after"})


def _well(evidence: Evidence) -> str:
    if (server := server_finding(evidence.traces)) is not None:
        return server.text
    ranks, steps = len(evidence.traces), _steps_compared(evidence)
    if not any(evidence.reduced(optimizer) for optimizer in evidence.optimizers):
        times = sum(1 for c in evidence.of("gathered") if c.equal)
        what = "sharded parameters as forward passes gathered them, learning rates and step counts"
        return f"{what} are equal on {ranks} ranks at {times} compared optimiser steps"
    equal = (
        f"parameters, moments and learning rates are equal on {ranks} ranks at the start and after each of {steps} "
        f"compared optimiser steps"
    )
    if any(evidence.reduced_in_step(optimizer) for optimizer in evidence.optimizers):
        return f"{equal}, though the gradients before them differ: they are reduced in the step"
    return f"{equal}, and so are the gradients before them, though the data differ: they are reduced"


def _coverage(traces: Sequence[RankTrace], evidence: Evidence) -> dict[str, Any]:
    optimizers = evidence.optimizers
    tensors = {kind: _most_compared(evidence, kind) for kind in KINDS}
    taken = {str(o): {str(t.rank): t.steps.get(o, 0) for t in traces} for o in optimizers}
    seen = sum(1 for word in evidence.inputs.values() if word != "unseen")
    return {
        "ranks": len(traces),
        "optimizer_steps": taken,
        "compared_steps": _steps_compared(evidence),
        "tensors": tensors,
        "steps_with_inputs": seen,
        "process_group": evidence.joined,
        "sums": sums_seen(evidence),
        "cuda_graphs": any(t.state.get("captured") for t in traces),
        "torch": any(t.state.get("torch") for t in traces),
    }


def _most_compared(evidence: Evidence, kind: str) -> int:
    """Returns the most tensors of a kind compared at one moment, summed over optimisers if each has its own."""
    most: dict[int, int] = {}
    for c in evidence.of(kind):
        key = c.moment.optimizer if kind in OPTIMIZED else 0
        most[key] = max(most.get(key, 0), c.compared)
    return sum(most.values())


KINDS = ("parameters", "gradients", "moments", "frozen", "buffers", "normalizers")


def _overhead(traces: Sequence[RankTrace]) -> dict[str, float]:
    """Returns the overhead of the rank with the largest share."""
    spent = [(trace.state.get("own_seconds", 0.0), trace.state.get("seconds", 0.0)) for trace in traces]
    shares = [(own / max(seconds - own, 1e-9), own, seconds) for own, seconds in spent if own > 0]
    share, own, seconds = max(shares, key=lambda each: each[0], default=(0.0, 0.0, 0.0))
    return {"own_seconds": own, "seconds": seconds, "share": share}
