"""Finds what optimiser steps don't show: untrained models, ranks that never step, settings and loaded states."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import same
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
from lockstep.doctor.judge.traces import RankTrace

IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that only choose an implementation of the step, which may depend on the device."""


def frozen_finding(evidence: Evidence) -> Finding | None:
    """Finds differing parameters that no optimiser updates: a fault from the first step, later only a doubt."""
    found = evidence.first_difference("frozen")
    if found is None:
        return None
    text = f"parameters that no optimiser updates differ: {difference(evidence, found)}"
    first = min(c.moment.step for c in evidence.of("frozen") if c.moment.optimizer == found.moment.optimizer)
    if found.moment.step == first:
        return fault("frozen", text, "frozen", figures(found))
    return Finding("frozen", DOUBT, text, CAUSES["frozen_later"], FIXES["frozen"], figures(found))


def unstepped_finding(evidence: Evidence) -> Finding | None:
    """Finds parameters of optimisers whose steps weren't seen, if they change: a doubt if they differ, else a note.

    They are trained in compiled code, or something else writes them, such as loading an opponent.
    """
    changing = set.intersection(*map(_changing, evidence.traces))
    compared = [c for c in evidence.of("unstepped") if c.compared]
    if not changing or not compared:
        return None
    found = next((c for c in compared if changing & set(c.differing)), None)
    if found is None:
        text = f"{len(changing)} parameters change though no step of their optimiser was seen; they were compared after"
        return Finding(
            "unstepped", NOTE, text + " other optimisers' steps, without moments and gradients, and are equal"
        )
    found = replace(found, differing=tuple(name for name in found.differing if name in changing))
    text = f"parameters that change, though no step of their optimiser was seen, differ: {difference(evidence, found)}"
    return Finding("unstepped", DOUBT, text, CAUSES["unstepped"], FIXES["unstepped"], figures(found))


def _changing(trace: RankTrace) -> set[str]:
    """Returns the names of a rank's parameters that changed though their optimiser never made a step that was seen."""
    parts = [check.parts.get("unstepped", {}) for moment, check in trace.checks.items() if moment.when == "after"]
    last = parts[-1] if parts else {}
    return {name for name, kept in last.items() if any(name in part and not same(part[name], kept) for part in parts)}


def settings_finding(evidence: Evidence) -> Finding | None:
    """Finds settings of optimisers, except learning rates, that differ between ranks that take steps."""
    for optimizer in evidence.optimizers:
        groups = {t.rank: t.settings[optimizer] for t in evidence.traces if optimizer in t.settings}
        first = next(iter(groups.values()), [])
        for number, group in enumerate(first):
            for name, value in group.items():
                others = {rank: _setting(each, number, name) for rank, each in groups.items()}
                if name in IMPLEMENTATIONS or all(other == value for other in others.values()):
                    continue
                said = ", ".join(f"{other} (rank {rank})" for rank, other in others.items())
                text = f"the setting {name}{of_optimizer(evidence, optimizer)} differs between ranks: {said}"
                return fault("settings", text, "settings", {"optimizer": optimizer, "setting": name})
    return None


def _setting(groups: Sequence[Mapping[str, Any]], number: int, name: str) -> Any:
    return groups[number].get(name) if number < len(groups) else None


def loaded_finding(evidence: Evidence) -> Finding | None:
    """Finds an optimiser whose state before its first step isn't the same on all ranks."""
    for optimizer in evidence.optimizers:
        counts = {t.rank: t.loaded[optimizer] for t in evidence.traces if optimizer in t.loaded}
        whose = of_optimizer(evidence, optimizer)
        if len(set(counts.values())) > 1 and 0 in counts.values():  # else each rank may rightly load its part
            said = ", ".join(f"{count or 'none'} (rank {rank})" for rank, count in counts.items())
            text = f"optimiser state{whose} differs before the first step: tensors loaded: {said}"
            return fault("moments", text, "loaded", {"optimizer": optimizer, "loaded": counts})
    found = evidence.first_difference("moments", "before")
    if found is None:
        return None
    text = f"optimiser state differs before the first step: {difference(evidence, found).replace(' from ', ' before ')}"
    return fault("moments", text, "loaded", figures(found))


def unmatched_finding(evidence: Evidence) -> Finding | None:
    """Finds normalisers that differ and can't be matched between ranks."""
    if not evidence.unmatched:
        return None
    names = ", ".join(sorted(evidence.unmatched))
    text = f"normalisers ({names}) differ, and it can't be told which of one rank is which of another"
    return Finding("unmatched", DOUBT, text, CAUSES["unmatched"], FIXES["unmatched"])


def unknown_finding(evidence: Evidence) -> Finding | None:
    """Notes objects that look like normalisers and weren't compared."""
    names = sorted(set().union(*(trace.unknown for trace in evidence.traces)))
    if not names:
        return None
    text = f"objects of {', '.join(names)} may keep running statistics, under names that aren't known; not compared"
    return Finding("unseen_statistics", NOTE, text, "", FIXES["unmatched"])


def blindness_finding(traces: Sequence[RankTrace]) -> Finding | None:
    """Finds errors of the doctor's own, because of which something wasn't compared."""
    failed = {trace.rank: trace.failures for trace in traces if trace.failures}
    if not failed:
        return None
    text = f"the doctor itself failed on {listed(list(failed))}, and didn't see all: {next(iter(failed.values()))[0]}"
    return Finding("blindness", DOUBT, text, "", FIXES["blindness"], {"errors": failed})


def stepping(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Returns the ranks that take optimiser steps."""
    return [trace for trace in traces if any(trace.steps.values())]


def server_finding(traces: Sequence[RankTrace]) -> Finding | None:
    """Judges whether ranks that never step have the stepping ranks' parameters at the beginning of every phase.

    None if all ranks step, or none. The first stepping rank stands for all of them; whether these are one agent among
    themselves isn't judged here.
    """
    servers = [trace.rank for trace in stepping(traces)]
    others = [trace for trace in traces if trace.rank not in servers]
    if not servers or not others:
        return None
    server = next(trace for trace in traces if trace.rank == servers[0])
    phases = sorted(set.intersection(*(set(t.models) for t in (server, *others))))
    trained = (
        {n for n in server.models[phases[0]] if len({server.models[p].get(n) for p in phases}) > 1} if phases else set()
    )
    names, several = listed([t.rank for t in others]), len(servers) > 1
    have = "have" if len(others) > 1 else "has"
    who = f"{listed(servers)} {'take' if several else 'takes'} all optimiser steps"
    whom, its = (listed(servers[:1]), "their") if several else ("it", "its")
    for phase in phases:
        if (found := _first_unlike(server, others, phase, trained)) is not None:
            rank, name, unlike, shared = found
            text = f"{who}, and {listed([rank])} differs from {whom} when rollout phase {phase + 1} begins: in {unlike}"
            text += f" of {shared} tensors, first {name}"
            return fault("server", text, "server", {"phase": phase + 1})
    if not trained:
        text = f"{who}, and whether {names} {have} {its} parameters wasn't seen: "
        text += f"that takes forward passes with and without gradients, on every rank, between two of {its} steps"
        return Finding("server", DOUBT, text)
    text = f"{who}, and {names} had {its} parameters whenever a rollout phase began, {len(phases)} times compared"
    return Finding("server", NOTE, text)


def _first_unlike(
    server: RankTrace, traces: Sequence[RankTrace], phase: int, trained: Container[str]
) -> tuple[int, str, int, int] | None:
    """Returns the first rank that differs from the server, the first tensor, how many differ, and of how many."""
    for trace in traces:
        shared = [name for name in server.models[phase] if name in trained and name in trace.models[phase]]
        unlike = [name for name in shared if trace.models[phase][name] != server.models[phase][name]]
        if unlike:
            return trace.rank, unlike[0], len(unlike), len(shared)
    return None
