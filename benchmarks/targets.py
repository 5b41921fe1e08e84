"""What the side-by-side benchmark is held to, and whether a run of it reached that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, get_args

from benchmarks.cases import A1, A1_BOTH, ARRAY_CARTPOLE, J1, J2, J3, R1, T1, T2, T2_BOTH, T3, T3_BOTH, Reduction
from benchmarks.comparison import Row, best, peers_of, ratio, ratios
from benchmarks.programs import COPIES, JAX_SHARDS, WEAK

Base = Literal["the best PyTorch peer", "the best of all peers", "rejax"]
TORCH: Base = "the best PyTorch peer"
ALL: Base = "the best of all peers"
GYMNASIUM = T1.env
Verdict = Literal["met", "met within noise", "missed within noise", "missed", "unknown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Group = Literal["over peers", "two ranks over one", "our own `fast` and `exact`"]
PEERS: Group = "over peers"
RANKS: Group = "two ranks over one"
REDUCTIONS: Group = "our own `fast` and `exact`"
MOST_NOISE = 0.05
"""A ratio further from its target than this share of it is no noise, whatever single repetitions say."""


@dataclass(frozen=True)
class Target:
    """A multiple of another row's steps/s that the best of our rows of a kind should reach.

    Gymnasium's environments, which are stepped one by one, are compared with peers that do so, too; all else with all.

    Attributes:
        case: name of the case.
        over: what it is a multiple of.
        factor: the multiple.
        env: which of our rows, by environment; None: whichever is fastest.
        reduction: and by reduction.
        devices: and with JAX by how many; None: whatever they have.
    """

    case: str
    over: Base
    factor: float
    env: str | None = None
    reduction: Reduction = "exact"
    devices: int | None = None

    @property
    def object_by_object(self) -> bool:
        """Whether peers that step all environments at once are left out."""
        return self.env == GYMNASIUM


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
    Target(J1.name, "rejax", 3.0, devices=JAX_SHARDS),
    Target(J2.name, "rejax", 2.8, devices=JAX_SHARDS),
    Target(J3.name, "rejax", 1.8, devices=JAX_SHARDS),
)
WEAK_TARGET = 1.9
"""Two ranks with as many environments each, over one."""
FAST_TARGET, EXACT_TARGET = 1.0, 0.9
"""``fast`` over ``exact``, and ``exact`` over ``fast``; of each of our rows."""


@dataclass(frozen=True)
class Judged:
    """One target, what was reached, and what that is.

    Attributes:
        group: what kind of target it is.
        what: the row that was judged, in words.
        over: the row that it was compared with, in words, and which peers failed that may have been better.
        factor: wanted.
        reached: the median of the repetitions' multiples, or None.
        verdict: what :func:`verdict_on` says; a ratio that can't be had is no success.
        beside: another ratio that helps to judge this one, in words.
    """

    group: Group
    case: str
    what: str
    over: str
    factor: float
    reached: float | None
    verdict: Verdict
    beside: str = ""


def judge(rows: Sequence[Row], cases: Iterable[str]) -> list[Judged]:
    """All targets of the cases that were measured."""
    wanted = set(cases)
    out = [_judged(target, rows) for target in TARGETS if target.case in wanted]
    return out + _weak(rows) + _reductions(rows)


def verdict_on(multiples: Sequence[float], factor: float) -> Verdict:
    """Says whether the median of the repetitions' multiples reaches a factor.

    It is within noise, above as below, where some repetition is on the other side and the median is near to the factor.
    """
    if not multiples:
        return "unknown"
    reached = median(multiples)
    met, near = reached >= factor, abs(reached / factor - 1) <= MOST_NOISE
    if near and any((one >= factor) != met for one in multiples):
        return "met within noise" if met else "missed within noise"
    return "met" if met else "missed"


def _judged(target: Target, rows: Sequence[Row]) -> Judged:
    """The best of our rows that a target means, over the best of the peers that it means.

    A peer that failed may have been better than the best: then a target may be missed, but isn't known to be met.
    """
    table = [row for row in rows if row.case == target.case and row.scaling is None]
    ours = [row for row in table if row.ours and row.reduction == target.reduction]
    ours = [row for row in ours if target.devices in (None, row.devices)]
    mine = best(row for row in ours if target.env in (None, row.env))
    peers = [row for row in peers_of(rows, target.case) if _is_meant(row, target)]
    base, failed = best(peers), [named(row, target.case) for row in peers if row.median is None]
    what = f"{target.env or 'ours'}, {target.reduction}" if mine is None else described(mine)
    over = target.over + (" with objects" if target.object_by_object else "")
    over += f", {named(base, target.case)}" if base is not None and base.label != target.over else ""
    over += f" (no figure of {'; '.join(failed)})" if failed else ""
    judged = _compared(PEERS, target.case, what, over, target.factor, [] if mine is None else ratios(mine, base))
    return replace(judged, verdict="unknown") if failed and judged.verdict != "missed" else judged


def named(peer: Row, case: str) -> str:
    """A peer's label, with its case if that is another than the one it is compared in."""
    return peer.label if peer.case == case else f"{peer.label} ({peer.case})"


def _is_meant(peer: Row, target: Target) -> bool:
    """Whether a peer is one of those that a target is a multiple of the best of."""
    if target.object_by_object and peer.batched:
        return False
    if target.over == TORCH:
        return peer.framework == "torch"
    return target.over in (ALL, peer.label)


def _compared(
    group: Group, case: str, what: str, over: str, factor: float, multiples: Sequence[float], beside: str = ""
) -> Judged:
    """A target with what the repetitions reached."""
    reached = median(multiples) if multiples else None
    return Judged(group, case, what, over, factor, reached, verdict_on(multiples, factor), beside)


def _weak(rows: Sequence[Row]) -> list[Judged]:
    """Weak scaling of ``exact``, for each environment; beside it how near that is to what the machine allows."""
    out = []
    for row in (row for row in rows if row.scaling == WEAK and row.reduction == "exact"):
        multiples, ceiling = ratios(row, single_rank(rows, row)), ratio(row, two_copies(rows, row))
        beside = "" if ceiling is None else f"{ceiling:.2f} × two independent runs"
        out.append(_compared(RANKS, row.case, described(row), "one rank", WEAK_TARGET, multiples, beside))
    return out


def _reductions(rows: Sequence[Row]) -> list[Judged]:
    """``fast`` and ``exact`` beside each other, wherever a row has a twin."""
    out = []
    for exact in (row for row in rows if row.ours and row.reduction == "exact"):
        fast = twin(rows, exact)
        if fast is None:
            continue
        case, gain, back = exact.case, ratios(fast, exact), ratios(exact, fast)
        out.append(_compared(REDUCTIONS, case, described(fast), "exact", FAST_TARGET, gain))
        out.append(_compared(REDUCTIONS, case, described(exact), "fast", EXACT_TARGET, back))
    return out


def twin(rows: Iterable[Row], exact: Row) -> Row | None:
    """The row that differs from one with ``exact`` in nothing but the reduction."""
    wanted = (exact.case, exact.env, exact.scaling, exact.devices, exact.label.replace("exact", "fast"))
    return next((r for r in rows if (r.case, r.env, r.scaling, r.devices, r.label) == wanted and r.ours), None)


def single_rank(rows: Iterable[Row], row: Row) -> Row | None:
    """The single rank that a row of the scaling is compared with."""
    wanted = (row.case, row.env, row.reduction)
    return next((r for r in rows if r.ours and r.scaling is None and (r.case, r.env, r.reduction) == wanted), None)


def two_copies(rows: Iterable[Row], row: Row) -> Row | None:
    """The two independent runs that a row of the scaling is compared with."""
    wanted = (COPIES, row.case, row.env, row.reduction)
    return next((r for r in rows if r.ours and (r.scaling, r.case, r.env, r.reduction) == wanted), None)


def described(row: Row) -> str:
    """One of our rows in a few words."""
    return ", ".join([row.env, row.label.removeprefix("Lockstep, "), *filter(None, [row.scaling])])
