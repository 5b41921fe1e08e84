"""Counts, means and variances that can be merged, and normalisation by them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64


class Moments(NamedTuple):
    """Holds count, mean and sum of squared deviations from the mean (`m2`) of a set of samples, per element."""

    count: int
    mean: Array
    m2: Array


def moments(x: ArrayLike) -> Moments:
    """Computes count, mean and m2 over axis 0 of `[N, ...]`, in two passes.

    N may be 0: mean and m2 are then 0, the neutral element of `merge_moments`.
    """
    (x,) = float64(x=x)
    if len(x) == 0:
        return Moments(0, np.zeros(x.shape[1:]), np.zeros(x.shape[1:]))
    mean = x.mean(axis=0)
    return Moments(len(x), mean, np.sum((x - mean) ** 2, axis=0))


def merge_moments(a: tuple[int, ArrayLike, ArrayLike], b: tuple[int, ArrayLike, ArrayLike]) -> Moments:
    """Computes the moments of the union of two disjoint sets of samples, given by their `(count, mean, m2)`.

    With `delta = mean_b - mean_a` and `n = n_a + n_b`:
    `mean = mean_a + delta * n_b / n`, `m2 = m2_a + m2_b + delta^2 * n_a * n_b / n`.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", the pairwise update.

    Raises:
        ValueError: If the shapes differ.
    """
    mean_a, m2_a, mean_b, m2_b = float64(mean_a=a[1], m2_a=a[2], mean_b=b[1], m2_b=b[2])
    count = a[0] + b[0]
    if count == 0:
        return Moments(0, mean_a, m2_a)
    delta = mean_b - mean_a
    mean = mean_a + delta * (b[0] / count)
    m2 = m2_a + m2_b + delta**2 * (a[0] * b[0] / count)
    return Moments(count, mean, m2)


def merge_all(parts: Sequence[tuple[int, ArrayLike, ArrayLike]]) -> Moments:
    """Merges the moments of `parts`, in shard order, from first to last: `((p_0 + p_1) + p_2) + ...`.

    Raises:
        ValueError: If `parts` is empty or the shapes differ.
    """
    if not parts:
        raise ValueError("no moments to merge: give at least one (count, mean, m2)")
    count, mean, m2 = parts[0]
    merged = Moments(count, *float64(mean=mean, m2=m2))
    for part in parts[1:]:
        merged = merge_moments(merged, part)
    return merged


def normalize_advantages(advantages: ArrayLike, mean: float, m2: float, count: int, eps: float = 1e-8) -> Array:
    """Returns `(A - mean) / (std + eps)` with `std = sqrt(m2 / count)`, the population standard deviation.

    The statistics are those of the whole global minibatch; `advantages` may be any part of it, of any shape.

    Raises:
        ValueError: If `count` isn't positive.
    """
    if count < 1:
        raise ValueError(f"count is {count}: a mean and a variance need at least one sample")
    (advantages,) = float64(advantages=advantages)
    return (advantages - mean) / (np.sqrt(m2 / count) + eps)
