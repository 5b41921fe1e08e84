"""Finds buffers of modules that differ between ranks, and tells statistics from what may be each rank's own."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import Comparison
from lockstep.doctor.judge.evidence import DOUBT, NOTE, Evidence, Finding, difference, fault, figures
from lockstep.doctor.watch.statistics_names import names_statistics

COUNTS = frozenset({"n", "_n", "count", "_count", "num_batches_tracked"})
"""Names of buffers that count samples: a module that has one keeps statistics in its others."""


def buffer_findings(evidence: Evidence) -> list[Finding]:
    """Finds buffers that differ: statistics are a fault, others a doubt, and what DDP replaces is a note."""
    unequal = [c for c in evidence.of("buffers") if c.differing]
    if not unequal:
        return []
    checks = [c for trace in evidence.traces for moment, c in trace.checks.items() if moment.when == "after"]
    sent = {name for check in checks for name in check.facts.get("broadcast", ())}
    replaced = sent if _goes_through_ddp(evidence) else set[str]()
    names = {name for check in checks for name in check.parts.get("buffers", {})}
    own = names - replaced
    counted = {_module(name) for name in names if name.rpartition(".")[2] in COUNTS}
    of_statistics = {name for name in names if names_statistics(name) or _module(name) in counted}
    found = []
    if (drifting := _first(unequal, own & of_statistics)) is not None:
        found.append(
            fault("buffers", f"buffers drift apart: {difference(evidence, drifting)}", "buffers", figures(drifting))
        )
    if (other := _first(unequal, own - of_statistics)) is not None:
        text = f"buffers differ that may be each rank's own: {difference(evidence, other)}"
        cause, fix = CAUSES["own_buffers"], FIXES["own_buffers"]
        found.append(Finding("own_buffers", DOUBT, text, cause, fix, figures(other)))
    if (lost := _first(unequal, replaced)) is not None:
        text = f"buffers are rank 0's: DDP replaces them before each forward pass ({len(lost.differing)} tensors, "
        text += f"first {lost.differing[0]}), so that what other ranks' data add to them is lost"
        found.append(Finding("ddp_buffers", NOTE, text, "", FIXES["buffers"], figures(lost)))
    return found


def _goes_through_ddp(evidence: Evidence) -> bool:
    """Returns whether the loss goes through DDP's forward, as far as passes were seen: only there buffers are sent."""
    before = [c.facts for trace in evidence.traces for moment, c in trace.checks.items() if moment.when == "before"]
    seen = any(facts.get("inputs") for facts in before)
    through = any("ddp" in facts.get("through", ()) for facts in before)
    return (through or not seen) and evidence.first_difference("gradients") is None


def _first(unequal: list[Comparison], names: Container[str]) -> Comparison | None:
    """Returns the first comparison in which some of these buffers differ, of these alone."""
    reduced = (replace(c, differing=tuple(name for name in c.differing if name in names)) for c in unequal)
    return next((c for c in reduced if c.differing), None)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
