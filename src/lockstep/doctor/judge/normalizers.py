"""Matches normalisers between ranks by class and attribute, or by where the script holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from lockstep.doctor.judge.traces import Kept, Part, fewest_numbers

Parts = Mapping[int, Part]
"""Normalisers' statistics by rank, then by name: class and attribute, the place in brackets, the statistic."""


def _base(name: str) -> str:
    """Returns ``VecNormalize.obs_rms`` for ``VecNormalize.obs_rms (main.env).mean`` or ``….obs_rms#2.mean``."""
    return name.rpartition(".")[0].partition(" (")[0].partition("#")[0]


def _statistic(name: str) -> str:
    return name.rpartition(".")[2]


def match_normalizers(parts: Parts, unplaced: Mapping[int, set[str]]) -> tuple[dict[int, Part], list[str]]:
    """Returns every rank's statistics by names that mean the same on all ranks, and classes that can't be matched.

    A normaliser that is the only one of its class and attribute on every rank is matched by these, others by place.
    Normalisers without a place can't be told apart: if every rank has the same values in some order, they are equal; if
    not, they can't be matched. Normalisers that only one rank has (for an evaluation) are ignored.
    """
    counts = {rank: Counter(_base(name) for name in part if _statistic(name) == _first(part, name))
              for rank, part in parts.items()}  # fmt: skip
    bases = set().union(*counts.values())
    single = {base for base in bases if all(count[base] == 1 for count in counts.values())}
    matched: dict[int, Part] = {}
    for rank, part in parts.items():
        kept: dict[str, Kept] = {}
        for name, value in part.items():
            if _base(name) in single:
                kept[f"{_base(name)}.{_statistic(name)}"] = value
            elif name.rpartition(".")[0] not in unplaced.get(rank, set()):
                kept[name] = value
        matched[rank] = kept
    return matched, [base for base in sorted(bases - single) if not _explained(base, parts, matched)]


def _first(part: Part, name: str) -> str:
    """Returns a normaliser's first statistic by name, so that each normaliser is counted once."""
    owner = name.rpartition(".")[0]
    return min(_statistic(other) for other in part if other.rpartition(".")[0] == owner)


def _explained(base: str, parts: Parts, matched: Mapping[int, Part]) -> bool:
    """Returns whether all normalisers of a class have partners, hold the same numbers, or are on one rank only."""
    shared, most = set.intersection(*(set(part) for part in matched.values())), fewest_numbers(parts.values())
    left = {
        rank: Counter(
            (_statistic(name), kept.thinned(most[kept.elements]).astype(np.float64).tobytes())
            for name, kept in part.items()
            if _base(name) == base and name not in shared
        )
        for rank, part in parts.items()
    }
    having = [found for found in left.values() if found]
    return len(having) < 2 or (all(found == having[0] for found in having) and len(having) == len(left))
