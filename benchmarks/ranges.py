"""How our rows compare with the best peers over all cases: the smallest and the largest ratio, and where they are.

A sentence about all cases is to be taken from here: whoever writes one by hand may forget the case that spoils it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.comparison import Row, best, peers_of, ratio
from benchmarks.tables import table, times_text
from benchmarks.targets import described, twin

Found = tuple[Row, float]


def over_best_peers(rows: Sequence[Row], cases: Iterable[str]) -> list[Found]:
    """Our rows that have a ratio over the best of all peers, with it."""
    out = []
    for case in cases:
        base = best(peers_of(rows, case))
        for row in ours_of(rows, case):
            reached = ratio(row, base)
            if reached is not None:
                out.append((row, reached))
    return out


def ours_of(rows: Iterable[Row], case: str) -> list[Row]:
    """Our rows of a case's table."""
    return [row for row in rows if row.ours and row.case == case and row.scaling is None]


def fastest(found: Iterable[Found], *, apart: Sequence[str]) -> list[Found]:
    """The row with the largest ratio among those that have the attributes ``apart`` in common."""
    largest: dict[tuple[object, ...], Found] = {}
    for one in found:
        key = tuple(getattr(one[0], name) for name in apart)
        if key not in largest or one[1] > largest[key][1]:
            largest[key] = one
    return list(largest.values())


def of_twins(found: Sequence[Found]) -> list[Found]:
    """The faster of ``exact`` and ``fast`` where a row is there as both."""
    out = []
    for row, reached in found:
        fast = twin([other for other, _ in found], row)
        if row.reduction == "exact" and fast is not None:
            out.append(max((row, reached), next(one for one in found if one[0] is fast), key=lambda one: one[1]))
    return out


def ranges_section(rows: Sequence[Row], cases: Sequence[str]) -> str:
    """The smallest and the largest ratio over the best peer, of several kinds of our rows; and which have none."""
    found = over_best_peers(rows, cases)
    exact = [one for one in found if one[0].reduction == "exact"]
    kinds = {
        "every row": found,
        "every `exact` row": exact,
        "the fastest `exact` row of each case and environment": fastest(exact, apart=("case", "env")),
        "the faster of `exact` and `fast`, where a row is there as both": of_twins(found),
        "the fastest row of each case and environment": fastest(found, apart=("case", "env")),
        "the fastest row of each case": fastest(found, apart=("case",)),
    }
    lines = []
    for what, some in kinds.items():
        ends = [pick(some, key=lambda one: one[1]) for pick in (min, max)] if some else []
        said = [f"{times_text(reached)} ({row.case}, {described(row)})" for row, reached in ends] or ["", ""]
        lines.append([what, str(len(some)), *said])
    have = [row for row, _ in found]
    without = [row for case in cases for row in ours_of(rows, case) if not any(row is other for other in have)]
    missing = "; ".join(f"{row.case}, {described(row)}" for row in without) or "none"
    text = (
        "Medians of the repetitions' own ratios, over the best of all peers that the case's rows are compared with; "
        f"without the scaling. Our rows that have no such ratio: {missing}."
    )
    head = ["ours", "how many", "smallest", "largest"]
    return "\n\n".join(["## Over the best peer, in all cases", table(head, lines), text])
