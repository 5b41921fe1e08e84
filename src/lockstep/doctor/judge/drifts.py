"""Finds running statistics that differ between ranks: a fault, unless they may be one environment's or one rank's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import Comparison, shared_moments
from lockstep.doctor.judge.evidence import DOUBT, Evidence, Finding, difference, fault, figures
from lockstep.doctor.judge.normalizers import match_normalizers
from lockstep.doctor.judge.traces import Moment, Part, fewest_numbers

ENVIRONMENT = re.compile("env", re.IGNORECASE)
"""What the name of a container of environments says."""
PER_ENVIRONMENT = ("NormalizeObservation.", "NormalizeReward.")
"""Gymnasium's wrappers, which may be around each environment or around all of them."""
INDEX = re.compile(r"(\w*)\[\d+\]")

Numbers = tuple[tuple[str, bytes], ...]
"""A normaliser's statistics by name."""
History = Mapping[Moment, Mapping[int, Mapping[str, Numbers]]]
"""By moment, rank and normaliser: its statistics."""


def normalizer_findings(evidence: Evidence) -> list[Finding]:
    """Finds running statistics of observations or rewards that differ.

    They are a doubt if each environment has its own, or if one rank alone uses them; else a fault.
    """
    unequal = sorted((c for c in evidence.of("normalizers") if c.differing), key=lambda c: c.moment.step)
    if not unequal:
        return []
    history = _history(evidence)
    alone = _used_alone(history, {_owner(name) for c in unequal for name in c.differing})
    first: dict[str, Comparison] = {}
    for c in unequal:
        kinds = {name: _kind(history[c.moment], _owner(name), alone) for name in c.differing}
        for kind in dict.fromkeys(kinds.values()):
            first.setdefault(kind, replace(c, differing=tuple(name for name in c.differing if kinds[name] == kind)))
    found = []
    if (c := first.get("normalizers")) is not None:
        text = f"normalisers drift apart: statistics of {difference(evidence, c)}"
        found.append(fault("normalizers", text, "normalizers", figures(c)))
    if (c := first.get("environment_normalizers")) is not None:
        text = f"each environment has a normaliser of its own, and so has each rank: {difference(evidence, c)}"
        found.append(_doubt("environment_normalizers", text, c))
    if (c := first.get("lone_normalizer")) is not None:
        text = f"a normaliser changes on one rank alone, beside one that is the same on all: {difference(evidence, c)}"
        found.append(_doubt("lone_normalizer", text, c))
    return found


def _doubt(kind: str, text: str, c: Comparison) -> Finding:
    return Finding(kind, DOUBT, text, CAUSES[kind], FIXES[kind], figures(c))


def _kind(held: Mapping[int, Mapping[str, Numbers]], owner: str, alone: set[str]) -> str:
    if _of_one_environment(held, owner):
        return "environment_normalizers"
    return "lone_normalizer" if owner in alone else "normalizers"


def _history(evidence: Evidence) -> History:
    """Returns all normalisers at all moments, under the names by which they are compared."""
    unplaced = {trace.rank: trace.unplaced for trace in evidence.traces}
    held: dict[Moment, dict[int, Part]] = {}
    for moment in shared_moments(evidence.traces):
        parts = {t.rank: t.checks[moment].parts.get("normalizers", {}) for t in evidence.traces}
        if any(parts.values()):
            held[moment], _ = match_normalizers(parts, unplaced)
    most = fewest_numbers(part for ranks in held.values() for part in ranks.values())
    return {moment: {rank: _by_owner(part, most) for rank, part in ranks.items()} for moment, ranks in held.items()}


def _by_owner(part: Part, most: Mapping[int, int]) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for name, kept in part.items():
        owner, _, statistic = name.rpartition(".")
        found[owner] = (
            *found.get(owner, ()),
            (statistic, kept.thinned(most[kept.elements]).astype(np.float64).tobytes()),
        )
    return found


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


# --- one environment's --------------------------------------------------------------------------------------------


def _of_one_environment(held: Mapping[int, Mapping[str, Numbers]], owner: str) -> bool:
    """Returns whether a normaliser is of one environment of several, whose statistics differ within each rank, too.

    Their places differ in an index alone: ``envs.envs[0].obs_rms``, ``envs.envs[1].obs_rms``.
    """
    return any(all(_unlike(each, pattern) for each in held.values()) for pattern in _siblings(owner))


def _siblings(owner: str) -> Iterator[re.Pattern[str]]:
    """Yields a pattern of the names of a normaliser and its neighbours, for each container of environments around."""
    base, _, place = owner.partition(" (")
    for index in INDEX.finditer(place):
        if ENVIRONMENT.search(index[1]) or base.startswith(PER_ENVIRONMENT):
            start, end = place[: index.end(1)], place[index.end() :]
            yield re.compile(rf"{re.escape(f'{base} ({start}')}\[\d+\]{re.escape(end)}")


def _unlike(held: Mapping[str, Numbers], pattern: re.Pattern[str]) -> bool:
    return len({numbers for owner, numbers in held.items() if pattern.fullmatch(owner)}) > 1


# --- one rank's ---------------------------------------------------------------------------------------------------


def _used_alone(history: History, differing: set[str]) -> set[str]:
    """Returns the normalisers that one rank alone uses: others leave theirs as they were while a merged one goes on.

    That rank has copied the merged one. If it updates its own instead, all ranks may train with what it doesn't send.
    """
    merged = [owner for owner in _owners(history) - differing if _moving(history, owner)]
    return {
        owner
        for owner in differing
        if _moves_on_one(history, owner) and any(_was_copied(history, owner, source) for source in merged)
    }


def _was_copied(history: History, owner: str, source: str) -> bool:
    """Returns whether what one rank alone holds of a normaliser is what it held of another by then, at some moment."""
    changing = _changing(history, owner)
    held: dict[tuple[int, int], set[Numbers]] = {}  # by optimiser and rank: moments are in order within an optimiser
    for moment, ranks in history.items():
        for rank in changing or ranks:
            mine = ranks[rank]
            until = held.setdefault((moment.optimizer, rank), set())
            if source in mine:
                until.add(mine[source])
            others = {each[owner] for other, each in ranks.items() if other != rank and owner in each}
            if owner in mine and mine[owner] in until - others:
                return True
    return False


def _owners(history: History) -> set[str]:
    return {owner for ranks in history.values() for held in ranks.values() for owner in held}


def _values(history: History, owner: str) -> list[list[Numbers]]:
    """Returns a normaliser's statistics at all moments, by rank; without ranks that don't hold it throughout."""
    ranks = next(iter(history.values()))
    found = [[held[rank].get(owner) for held in history.values()] for rank in ranks]
    return [[value for value in each if value is not None] for each in found if None not in each]


def _moving(history: History, owner: str) -> bool:
    """Returns whether every rank holds a normaliser throughout and changes it."""
    ranks = len(next(iter(history.values())))
    return len(_values(history, owner)) == ranks == len(_changing(history, owner))


def _changing(history: History, owner: str) -> list[int]:
    """Returns the ranks whose statistics of a normaliser change."""
    ranks = next(iter(history.values()))
    return [rank for rank in ranks if len({held[rank].get(owner) for held in history.values()}) > 1]


def _moves_on_one(history: History, owner: str) -> bool:
    values = _values(history, owner)
    return len(values) == len(next(iter(history.values()))) and len(_changing(history, owner)) <= 1
