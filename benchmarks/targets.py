"""What the side-by-side benchmark is held to, and whether a run of it reached that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.cases import A1, A1_BOTH, ARRAY_CARTPOLE, J1, J2, J3, R1, T1, T2, T2_BOTH, T3, T3_BOTH, Reduction
from benchmarks.comparison import Row, best, ratio
from benchmarks.programs import WEAK

Base = Literal["the best PyTorch peer", "the best of all peers", "rejax", "one rank", "exact", "fast"]
TORCH: Base = "the best PyTorch peer"
ALL: Base = "the best of all peers"
GYMNASIUM = T1.env
MOST_NOISE = 0.05
"""A ratio this much below 1 is no noise, even where the ranges of two rows overlap."""


@dataclass(frozen=True)
class Target:
    """A multiple of another row's steps/s that the best of our rows of a kind should reach.

    Attributes:
        case: name of the case.
        over: what it is a multiple of.
        factor: the multiple.
        env: which of our rows, by environment; None: whichever is fastest.
        reduction: and by reduction.
    """

    case: str
    over: Base
    factor: float
    env: str | None = None
    reduction: Reduction = "exact"


TARGETS = (
    Target(T1.name, TORCH, 3.7, ARRAY_CARTPOLE),
    Target(T1.name, ALL, 3.3, ARRAY_CARTPOLE),
    Target(T1.name, TORCH, 3.0, GYMNASIUM),
    Target(T1.name, ALL, 2.7, GYMNASIUM),
    Target(T2.name, TORCH, 3.3, ARRAY_CARTPOLE),
    Target(T2.name, ALL, 2.3, ARRAY_CARTPOLE),
    Target(T2.name, TORCH, 1.85, GYMNASIUM),
    Target(T2.name, ALL, 1.25, GYMNASIUM),
    Target(T3.name, TORCH, 3.0),
    Target(T3.name, ALL, 3.0),
    Target(A1.name, TORCH, 1.1),
    Target(A1.name, TORCH, 1.25, reduction="fast"),
    Target(R1.name, TORCH, 3.5),
    Target(T2_BOTH.name, TORCH, 2.0),
    Target(T3_BOTH.name, TORCH, 2.5),
    Target(A1_BOTH.name, TORCH, 1.4),
    Target(J1.name, "rejax", 3.0),
    Target(J2.name, "rejax", 2.8),
    Target(J3.name, "rejax", 1.8),
)
WEAK_TARGET = 1.9
"""Two ranks with as many environments each, over one."""
FAST_TARGET, EXACT_TARGET = 1.0, 0.9
"""``fast`` over ``exact``, but for noise, and ``exact`` over ``fast``; of each of our rows."""


@dataclass(frozen=True)
class Judged:
    """One target, what was reached, and what that is.

    Attributes:
        what: the row that was judged, in words.
        over: the row that it was compared with, in words.
        factor: wanted.
        reached: a multiple, or None.
        verdict: "met", "met within noise", "missed" or "unknown"; a ratio that can't be had is no success.
    """

    case: str
    what: str
    over: str
    factor: float
    reached: float | None
    verdict: str


def judge(rows: Sequence[Row], cases: Iterable[str]) -> list[Judged]:
    """All targets of the cases that were measured."""
    wanted = set(cases)
    out = [_judged(target, rows) for target in TARGETS if target.case in wanted]
    return out + _weak(rows) + _reductions(rows)


def _judged(target: Target, rows: Sequence[Row]) -> Judged:
    """The best of our rows that a target means, over the best of the peers that it means."""
    table = [row for row in rows if row.case == target.case and row.scaling is None]
    ours = [row for row in table if row.ours and row.reduction == target.reduction]
    mine = best(row for row in ours if target.env in (None, row.env))
    peers = [row for row in table if not row.ours]
    if target.over == TORCH:
        peers = [row for row in peers if row.framework == "torch"]
    elif target.over != ALL:
        peers = [row for row in peers if row.label == target.over]
    base = best(peers)
    what = f"{target.env or 'ours'}, {target.reduction}" if mine is None else described(mine)
    over = target.over if base is None or base.label == target.over else f"{target.over}, {base.label}"
    return _with_verdict(target.case, what, over, target.factor, None if mine is None else ratio(mine, base))


def _with_verdict(case: str, what: str, over: str, factor: float, reached: float | None, noise: bool = False) -> Judged:
    if reached is None:
        return Judged(case, what, over, factor, None, "unknown")
    said = "met" if reached >= factor else "met within noise" if noise else "missed"
    return Judged(case, what, over, factor, reached, said)


def _weak(rows: Sequence[Row]) -> list[Judged]:
    """Weak scaling of ``exact``, for each environment."""
    out = []
    for row in (row for row in rows if row.scaling == WEAK and row.reduction == "exact"):
        reached = ratio(row, single_rank(rows, row))
        out.append(_with_verdict(row.case, described(row), "one rank", WEAK_TARGET, reached))
    return out


def _reductions(rows: Sequence[Row]) -> list[Judged]:
    """``fast`` and ``exact`` beside each other, wherever a row has a twin."""
    out = []
    for exact in (row for row in rows if row.ours and row.reduction == "exact"):
        fast = twin(rows, exact)
        if fast is None:
            continue
        gain, back = ratio(fast, exact), ratio(exact, fast)
        out.append(_with_verdict(exact.case, described(fast), "exact", FAST_TARGET, gain, within_noise(fast, exact)))
        out.append(_with_verdict(exact.case, described(exact), "fast", EXACT_TARGET, back))
    return out


def within_noise(row: Row, base: Row) -> bool:
    """Whether a row that seems a little slower may be as fast: some repetition of it beat one of the other."""
    gain = ratio(row, base)
    return gain is not None and gain >= 1 - MOST_NOISE and max(row.rates) >= min(base.rates)


def twin(rows: Iterable[Row], exact: Row) -> Row | None:
    """The row that differs from one with ``exact`` in nothing but the reduction."""
    wanted = (exact.case, exact.env, exact.scaling, exact.devices, exact.label.replace("exact", "fast"))
    return next((r for r in rows if (r.case, r.env, r.scaling, r.devices, r.label) == wanted and r.ours), None)


def single_rank(rows: Iterable[Row], row: Row) -> Row | None:
    """The single rank that a row of the scaling is compared with."""
    wanted = (row.case, row.env, row.reduction)
    return next((r for r in rows if r.ours and r.scaling is None and (r.case, r.env, r.reduction) == wanted), None)


def described(row: Row) -> str:
    """One of our rows in a few words."""
    return ", ".join([row.env, row.label.removeprefix("Lockstep, "), *filter(None, [row.scaling])])
