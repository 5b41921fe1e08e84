"""Computes how long the slowest of several takes, by order statistics of measured times rather than their means.

Ranks that meet go on when the last one is there. If their times are independent with distribution functions ``F_i``,
the maximum's distribution function is ``prod_i F_i``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.core.shards import keyed_generator

DRAWS, MOST_NUMBERS = 256, 4_000_000


def expected_max(times: Sequence[Sequence[float] | np.ndarray]) -> float:
    """Returns the expected time of the slowest, if each draws independently from its own measured times.

    With all times sorted, ``x_1 <= x_2 <= …``, it is the sum of ``x_j`` times the increase of the product of empirical
    distribution functions at ``x_j`` (David & Nagaraja 2003, section 2.1).

    Raises:
        ValueError: one of them has no times.
    """
    if not all(len(x) for x in times):
        raise ValueError("every one of them needs a time")
    owners = np.concatenate([np.full(len(x), i) for i, x in enumerate(times)])
    values = np.concatenate([np.asarray(x, np.float64) for x in times])
    order = np.argsort(values, kind="stable")
    below = np.zeros(len(times))
    total, before = 0.0, 0.0
    for place in order.tolist():
        owner = int(owners[place])
        below[owner] += 1.0 / len(times[owner])
        now = float(np.prod(np.minimum(below, 1.0)))
        total += float(values[place]) * (now - before)
        before = now
    return total


def normal_excess(count: int) -> float:
    """Returns the expected maximum of ``count`` independent standard normal numbers.

    It is the ``integral over x > 0 of 1 - Phi(x)^n - Phi(-x)^n``, by the trapezium rule: 0 for one, 0.5642 for two
    (``1 / sqrt(pi)``), 1.4236 for eight.
    """
    if count < 2:
        return 0.0
    x = np.linspace(0.0, 10.0, 4001)
    below = np.array([0.5 * math.erfc(value / math.sqrt(2.0)) for value in x])
    return float(np.trapezoid(1.0 - (1.0 - below) ** count - below**count, x))


def expected_max_of_sums(times: Sequence[float] | np.ndarray, terms: int, count: int) -> float:
    """Returns the expected maximum of ``count`` sums, each of ``terms`` times drawn from the measured ones.

    It simulates keyed draws if they are few enough; otherwise it takes the sums to be normal.
    """
    values = np.asarray(times, np.float64)
    mean, deviation = float(values.mean()), float(values.std())
    if count == 1 or terms == 0 or deviation == 0.0:
        return terms * mean
    if DRAWS * terms * count <= MOST_NUMBERS:
        drawn = keyed_generator(0, "waiting", terms, count).integers(len(values), size=(DRAWS, count, terms))
        return float(values[drawn].sum(-1).max(-1).mean())
    return terms * mean + math.sqrt(terms) * deviation * normal_excess(count)
