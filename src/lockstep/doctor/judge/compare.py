"""Compares ranks with one another, by pure functions of their traces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.judge.normalizers import match_normalizers
from lockstep.doctor.judge.traces import Kept, Moment, Part, RankTrace
from lockstep.doctor.watch.side_store import BETWEEN_WORDS, OPTIMIZED


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one kind of tensors at one moment on all ranks.

    Attributes:
        kind: ``parameters``, ``gradients``, ``moments``, ``frozen``, ``buffers``, ``normalizers`` or ``gathered``.
        compared: number of tensors that every rank should hold wholly, with the same values.
        sharded: number of tensors of which each rank rightly holds a different part.
        differing: names of the tensors that differ, in order.
        ranks: ranks that differ from the first one.
        relative: largest difference over all differing tensors, each relative to its largest element; NaN if the kept
            samples are equal and only the digests differ.
        nonzero: whether any kept number of the compared tensors isn't 0.
    """

    kind: str
    moment: Moment
    compared: int
    sharded: int
    differing: tuple[str, ...]
    ranks: tuple[int, ...]
    relative: float
    nonzero: bool

    @property
    def equal(self) -> bool:
        """Whether there was something to compare and it is the same on all ranks."""
        return self.compared > 0 and not self.differing


def same(a: Kept, b: Kept) -> bool:
    """Returns whether two ranks, or one at two moments, hold the same tensor.

    Then the numbers that both kept are equal (NaN equals NaN), and the digests if both have one.
    """
    if a.elements != b.elements or (a.digest and b.digest and a.digest != b.digest):
        return False
    return bool(np.array_equal(*_of_both(a, b), equal_nan=True))


def _of_both(a: Kept, b: Kept) -> tuple[np.ndarray, np.ndarray]:
    """Returns what both kept of two tensors of one size: at the same places."""
    most = min(len(a.numbers), len(b.numbers))
    return a.thinned(most), b.thinned(most)


def relative_difference(a: Kept, b: Kept) -> float:
    """Returns the largest difference of two tensors' kept elements over their largest magnitude.

    It is NaN if the kept elements are equal; infinite if shapes, or the places of NaNs or infinities, differ.
    """
    if a.elements != b.elements:
        return float("inf")
    x, y = (numbers.astype(np.float64) for numbers in _of_both(a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(np.isnan(x), np.isnan(y)) or not np.array_equal(x[np.isinf(x)], y[np.isinf(x)]):
        return float("inf")
    scale = max(np.abs(x[finite]).max(initial=0.0), np.abs(y[finite]).max(initial=0.0))
    difference = np.abs(x[finite] - y[finite]).max(initial=0.0)
    return float(difference / scale) if difference > 0 else float("nan")


WITNESSES = frozenset({"own", "stepped", "whole"})
"""Kinds that need not be equal: gradients as ``backward`` left them and as the step got them; models not yet sent."""
EVERYWHERE = frozenset({"parameters", "gradients"})
"""Kinds that every rank must have if one has them. Ranks may split moments, and one alone may have a normaliser."""


def compare_parts(
    kind: str, moment: Moment, parts: Mapping[int, Part], names: Mapping[str, str] | None = None
) -> Comparison:
    """Compares one kind of tensors, ``parts[rank]``; ``names`` replaces places in the optimiser in the result.

    If not every rank has a tensor, a moment counts as sharded, a buffer or normaliser as one rank's own, and a
    parameter or gradient as a difference.
    """
    ranks = sorted(parts)
    first, others = parts[ranks[0]], ranks[1:]
    known = list(dict.fromkeys(name for rank in ranks for name in parts[rank]))
    shared = [name for name in known if all(name in parts[rank] for rank in ranks)]
    wanted = known if kind in EVERYWHERE else shared
    held = [name for name in wanted if not any(parts[r][name].shards for r in ranks if name in parts[r])]
    unlike = {rank: [n for n in held if not _alike(first.get(n), parts[rank].get(n))] for rank in others}
    found = {name for names in unlike.values() for name in names}
    sizes = [_size(first.get(name), parts[rank].get(name)) for rank in others for name in unlike[rank]]
    places = tuple(name for name in held if name in found)
    return Comparison(
        kind,
        moment,
        compared=len(held),
        sharded=len(known if kind in OPTIMIZED else shared) - len(held),
        differing=places if names is None else tuple(told(place, names) for place in places),
        ranks=tuple(rank for rank in others if unlike[rank]),
        relative=max((size for size in sizes if not np.isnan(size)), default=float("nan")),
        nonzero=any(np.any(part[name].numbers) for part in parts.values() for name in held if name in part),
    )


def _alike(mine: Kept | None, other: Kept | None) -> bool:
    return mine is other if mine is None or other is None else same(mine, other)


def _size(mine: Kept | None, other: Kept | None) -> float:
    return float("inf") if mine is None or other is None else relative_difference(mine, other)


def _split(place: str) -> tuple[str, str]:
    """Splits a place in the optimiser, ``0.2``, from a moment's own name, ``exp_avg``, which may be empty."""
    group, number, rest = (*place.split(".", 2), "")[:3]
    return f"{group}.{number}", rest


def told(place: str, names: Mapping[str, str]) -> str:
    """Returns a tensor's name for its place; a moment's own name follows the parameter's."""
    key, rest = _split(place)
    group, number = key.split(".")
    name = names.get(key, f"parameter {number} of group {group}")
    return f"{name}.{rest}" if rest else name


def named_alike(traces: Sequence[RankTrace], optimizer: int) -> bool:
    """Returns whether an optimiser's parameters have the same unique names on all ranks, in any order."""
    names = [trace.names.get(optimizer, {}) for trace in traces]
    sets = [set(each.values()) for each in names]
    return all(len(found) == len(each) and found == sets[0] for found, each in zip(sets, names, strict=True))


def by_name(part: Part, names: Mapping[str, str]) -> Part | None:
    """Returns a part keyed by names instead of places; None if a place has no name."""
    if not all(_split(place)[0] in names for place in part):
        return None
    return {told(place, names): kept for place, kept in part.items()}


def shared_moments(traces: Sequence[RankTrace]) -> list[Moment]:
    """Returns the moments that every rank recorded, ordered by optimiser, then by time."""
    if not traces:
        return []
    order = {"before": 0, "after": 1, "end": 2}
    shared = set(traces[0].checks).intersection(*(trace.checks for trace in traces[1:]))
    return sorted(shared, key=lambda m: (m.optimizer, m.step, order[m.when]))


def comparisons(traces: Sequence[RankTrace], unmatched: set[str]) -> Iterator[Comparison]:
    """Yields comparisons of every kind of tensors at every moment that all ranks recorded.

    Adds to ``unmatched`` the classes of normalisers that can't be matched between ranks.
    """
    unplaced = {trace.rank: trace.unplaced for trace in traces}
    alike = {o: named_alike(traces, o) for o in {moment.optimizer for moment in shared_moments(traces)}}
    for moment in shared_moments(traces):
        checks = {trace.rank: trace.checks[moment] for trace in traces}
        names = {trace.rank: trace.names.get(moment.optimizer, {}) for trace in traces}
        for kind in next(iter(checks.values())).parts:
            if kind in WITNESSES or not all(kind in check.parts for check in checks.values()):
                continue
            parts = {rank: check.parts[kind] for rank, check in checks.items()}
            if kind == "normalizers":
                parts, unknown = match_normalizers(parts, unplaced)
                unmatched |= set(unknown)
            if kind not in OPTIMIZED:
                yield compare_parts(kind, moment, parts)
                continue
            named = (
                {rank: by_name(part, names[rank]) for rank, part in parts.items()} if alike[moment.optimizer] else {}
            )
            whole = {rank: part for rank, part in named.items() if part is not None}
            if len(whole) == len(parts):  # ranks may order the groups differently
                yield compare_parts(kind, moment, whole)
            else:
                yield compare_parts(kind, moment, parts, names[traces[0].rank])


def inputs_at(traces: Sequence[RankTrace], moment: Moment) -> str:
    """Returns whether the ranks' data before a step are ``equal``, ``differ``, or were ``unseen`` on some rank.

    If they weren't seen, they differ where ``backward`` left different gradients, which the script then reduced.

    They count as equal if one rank's are a subsequence of another's: additional passes (the graph for a log, an
    evaluation with gradients) are no training data. They also do in another order, which gives equal gradients.
    """
    words = [list(filter(None, trace.checks[moment].facts.get("inputs", "").split(BETWEEN_WORDS))) for trace in traces]
    if not all(words):
        return "differ" if _own_gradients_differ(traces, moment) else "unseen"
    words.sort(key=len)
    return "equal" if all(_among(fewer, more) for fewer, more in itertools.pairwise(words)) else "differ"


def ranks_alike(traces: Sequence[RankTrace], moments: Sequence[Moment]) -> list[int]:
    """Returns the most ranks whose data before all these steps were the same in order, as far as gradients show.

    It is one rank if none were, or if some data weren't seen.
    """
    alike: dict[tuple[str, ...], list[RankTrace]] = {}
    for trace in traces:
        words = tuple(trace.checks[moment].facts.get("inputs", "") for moment in moments)
        if all(words):
            alike.setdefault(words, []).append(trace)
    found = max(alike.values(), key=len, default=list(traces[:1]))
    apart = any(_own_gradients_differ(found, moment) for moment in moments)
    return [trace.rank for trace in (found[:1] if apart else found)]


def collected_at(traces: Sequence[RankTrace], moment: Moment) -> str:
    """Returns whether what ranks had collected before a step is ``equal`` in order, ``differ``, or was ``unseen``."""
    words = {trace.checks[moment].facts.get("collected", "") for trace in traces}
    return "unseen" if "" in words else "equal" if len(words) == 1 else "differ"


def rows_in_common(traces: Sequence[RankTrace], moments: Sequence[Moment]) -> int:
    """Returns how many rows ranks were given at the same steps, of those that are known: the fewest of two ranks.

    Only rows are known that a rollout has once.
    """
    first, *others = traces
    rows = {m: [set(trace.checks[m].facts.get("rows", ())) for trace in (first, *others)] for m in moments}
    return min(sum(len(each[0] & each[n]) for each in rows.values()) for n in range(1, len(others) + 1))


def _own_gradients_differ(traces: Sequence[RankTrace], moment: Moment) -> bool:
    first, *others = (trace.checks[moment].parts.get("own", {}) for trace in traces)
    return any(not same(kept, other[place]) for other in others for place, kept in first.items() if place in other)


def _among(fewer: Sequence[str], more: Sequence[str]) -> bool:
    """Returns whether words are a subsequence of others, or the same words in another order."""
    left = iter(more)
    return all(word in left for word in fewer) or sorted(fewer) == sorted(more)


def rate_at(trace: RankTrace, optimizer: int, step: int) -> list[float | None]:
    """Returns an optimiser's learning rates when it had taken ``step`` steps; empty if none are known."""
    return next((rates for since, rates in reversed(trace.rates.get(optimizer, [])) if since <= step), [])


def first_rate_difference(traces: Sequence[RankTrace], optimizer: int, parted: int | None = None) -> int | None:
    """Returns the number of steps taken when learning rates first differ between ranks; None if they never do.

    Only steps before ``parted`` count: from there on ranks took different numbers of steps, and the same number no
    longer means the same step. Ranks without known rates are left out.
    """
    traces = [trace for trace in traces if trace.rates.get(optimizer)]
    taken = min((trace.steps.get(optimizer, 0) for trace in traces), default=0)
    last = taken if parted is None else min(taken, parted - 1)
    changes = {step for trace in traces for step, _ in trace.rates.get(optimizer, []) if step <= last}
    rates = ((step, {tuple(rate_at(trace, optimizer, step)) for trace in traces}) for step in sorted(changes))
    return next((step for step, found in rates if len(found) > 1), None)
