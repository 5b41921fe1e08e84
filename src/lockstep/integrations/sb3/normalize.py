"""Merges ``VecNormalize`` over ranks: each rank's statistics run on during a rollout, and are merged after it."""

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
    """Every ``VecNormalize`` around a vector environment, the outermost first."""
    found, inner = [], env
    while isinstance(inner, VecEnvWrapper):
        if isinstance(inner, VecNormalize):
            found.append(inner)
        inner = inner.venv
    return found


def running_statistics(env: VecEnv) -> list[RunningMeanStd]:
    """The running statistics of observations (by key, if they are a dict) and returns around a vector environment."""
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
    """Count, mean and variance of the samples that ``now`` has and ``base`` hasn't: Chan et al. 1983, backwards."""
    count = now.count - base.count
    if count <= 0:
        return 0.0, np.zeros_like(now.mean), np.zeros_like(now.var)
    mean = base.mean + (now.mean - base.mean) * (now.count / count)
    square = now.var * now.count - base.var * base.count
    square -= np.square(mean - base.mean) * (base.count * count / now.count)
    return count, mean, np.maximum(square / count, 0.0)


class MergedStatistics:
    """The statistics of one vector environment's normalisers, which ranks merge from time to time.

    ``gather`` gives a tensor of every rank, ``[world_size, …]``.
    """

    def __init__(self, env: VecEnv, gather: Callable[[Tensor], Tensor]) -> None:
        self.env, self._gather = env, gather
        self._statistics = running_statistics(env)
        self._base = [statistics.copy() for statistics in self._statistics]

    def go_on(self, fresh: bool) -> None:
        """Merge before a ``learn``; take the first rank's statistics if those of any rank are ``fresh``, or replaced.

        Statistics are replaced by other objects, or set back to fewer samples.
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
        """Set every rank's statistics to those of rank 0: where all of them go on from."""
        parts = [(s.count, s.mean, s.var) for s in self._statistics]
        for statistics, ranks in zip(self._statistics, self._exchanged(parts), strict=True):
            statistics.count, statistics.mean, statistics.var = ranks[0]
        self._base = [statistics.copy() for statistics in self._statistics]

    def merge(self) -> None:
        """Add what each rank has seen since the last merge to what all of them had then, in rank order."""
        parts = [since(base, now) for base, now in zip(self._base, self._statistics, strict=True)]
        for base, now, ranks in zip(self._base, self._statistics, self._exchanged(parts), strict=True):
            for count, mean, variance in ranks:
                if count:
                    base.update_from_moments(mean, variance, count)
            now.count, now.mean, now.var = base.count, base.mean.copy(), base.var.copy()

    def _exchanged(self, parts: list[Moments]) -> list[list[Moments]]:
        """Count, mean and variance of every statistic and rank; one collective, or none where there are none."""
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
