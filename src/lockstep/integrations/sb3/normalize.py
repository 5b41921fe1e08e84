"""Merges the statistics of ``VecNormalize`` over ranks: each rank updates its own in a rollout, then they merge."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from torch import Tensor

Moments = tuple[float, np.ndarray, np.ndarray]
"""Count, mean and variance."""


def normalizers(env: VecEnv) -> list[VecNormalize]:
    """Returns every ``VecNormalize`` around a vector environment, the outermost first."""
    found, inner = [], env
    while isinstance(inner, VecEnvWrapper):
        if isinstance(inner, VecNormalize):
            found.append(inner)
        inner = inner.venv
    return found


def running_statistics(env: VecEnv) -> list[RunningMeanStd]:
    """Returns the running statistics of every ``VecNormalize``: observations (by sorted key, if a dict) and returns."""
    found: list[RunningMeanStd] = []
    for normalizer in normalizers(env):
        observations = getattr(normalizer, "obs_rms", None)
        if isinstance(observations, dict):
            found += [observations[key] for key in sorted(observations)]
        elif observations is not None:
            found.append(observations)
        found.append(normalizer.ret_rms)
    return found


def since(base: RunningMeanStd, now: RunningMeanStd) -> Moments:
    """Returns count, mean and variance of the samples in ``now`` but not in ``base``: Chan et al. 1983, inverted."""
    count = now.count - base.count
    if count <= 0:
        return 0.0, np.zeros_like(now.mean), np.zeros_like(now.var)
    mean = base.mean + (now.mean - base.mean) * (now.count / count)
    square = now.var * now.count - base.var * base.count
    square -= np.square(mean - base.mean) * (base.count * count / now.count)
    return count, mean, np.maximum(square / count, 0.0)


class MergedStatistics:
    """Merges the statistics of one vector environment's normalisers over ranks.

    ``gather`` stacks a tensor over ranks: ``[world_size, …]``.
    """

    def __init__(self, env: VecEnv, gather: Callable[[Tensor], Tensor]) -> None:
        self.env, self._gather = env, gather
        self._statistics = running_statistics(env)
        self._base = [statistics.copy() for statistics in self._statistics]

    def go_on(self, fresh: bool) -> None:
        """Merges before ``learn``, or takes rank 0's statistics if any rank's are ``fresh`` or replaced.

        Statistics count as replaced if they are other objects, or hold fewer samples than at the last merge.
        """
        now = running_statistics(self.env)
        same = len(now) == len(self._statistics) and all(a is b for a, b in zip(now, self._statistics, strict=True))
        fewer = any(a.count < base.count for a, base in zip(now, self._base, strict=False))
        if self._gather(torch.tensor([fresh or not same or fewer])).any():
            self._statistics = now
            self.take_from_the_first_rank()
        else:
            self.merge()

    def take_from_the_first_rank(self) -> None:
        """Sets every rank's statistics to those of rank 0; the next merge starts from them."""
        parts = [(s.count, s.mean, s.var) for s in self._statistics]
        for statistics, ranks in zip(self._statistics, self._exchanged(parts), strict=True):
            statistics.count, statistics.mean, statistics.var = ranks[0]
        self._base = [statistics.copy() for statistics in self._statistics]

    def merge(self) -> None:
        """Adds each rank's samples since the last merge, in rank order, to the statistics of that merge."""
        parts = [since(base, now) for base, now in zip(self._base, self._statistics, strict=True)]
        for base, now, ranks in zip(self._base, self._statistics, self._exchanged(parts), strict=True):
            for count, mean, variance in ranks:
                if count:
                    base.update_from_moments(mean, variance, count)
            now.count, now.mean, now.var = base.count, base.mean.copy(), base.var.copy()

    def _exchanged(self, parts: list[Moments]) -> list[list[Moments]]:
        """Gathers count, mean and variance of every statistic from every rank: one collective, none if no parts."""
        if not parts:
            return []
        flat = np.concatenate([np.concatenate([[count], mean.ravel(), var.ravel()]) for count, mean, var in parts])
        rows = self._gather(torch.from_numpy(flat)).numpy()
        ends = np.cumsum([1 + 2 * mean.size for _, mean, _ in parts])
        blocks = zip(np.split(rows, ends[:-1], axis=1), [mean.shape for _, mean, _ in parts], strict=True)
        return [
            [(float(row[0]), both[0, ...], both[1, ...]) for row in block for both in [row[1:].reshape(2, *shape)]]
            for block, shape in blocks
        ]
