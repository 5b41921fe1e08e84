"""Running normalisation of observations and rewards, on the host in float64, for the torch engine and for policies.

The JAX engine normalises inside its program, by the same rules and with the same :data:`EPSILON`.
Statistics are frozen during an iteration; after it the shards' deltas are merged in shard order (Chan et al. 1983).
Every function works on one shard at a time, so that no result depends on which shards a rank owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPSILON = 1e-8


@dataclass
class RunningMoments:
    """Holds count, mean ``[size]`` and sum of squared deviations ``[size]``, all float64."""

    count: float
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def empty(cls, size: int) -> RunningMoments:
        """Returns the moments of no samples."""
        return cls(0.0, np.zeros(size), np.zeros(size))

    @property
    def variance(self) -> np.ndarray:
        """Population variance ``[size]``; ones if there are no samples yet."""
        return self.m2 / self.count if self.count else np.ones_like(self.m2)

    @property
    def finite(self) -> bool:
        """Tells whether these moments can normalise anything: samples were finite, and could be squared."""
        return bool(np.isfinite(self.mean).all() and np.isfinite(self.m2).all())

    @np.errstate(over="ignore", invalid="ignore")  # of numbers too large for any; who merges looks at the result
    def merge(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        """Merges the moments of further samples into these."""
        if not count:
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.m2 = self.m2 + m2 + delta * delta * (self.count * count / total)
        self.count = total

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint stores."""
        return {"count": np.array([self.count]), "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> RunningMoments:
        """Restores moments from what :meth:`arrays` returned."""
        return cls(float(arrays["count"][0]), arrays["mean"].copy(), arrays["m2"].copy())


@np.errstate(over="ignore", invalid="ignore")
def shard_moments(samples: np.ndarray) -> np.ndarray:
    """Returns mean and M2 of one shard's samples ``[n, size]``, float64 ``[2, size]``."""
    x = np.ascontiguousarray(samples, np.float64)
    if not len(x):
        return np.zeros((2, x.shape[1]))
    mean = x.mean(0)
    return np.stack([mean, np.square(x - mean).sum(0)])


def merge_shards(moments: RunningMoments, parts: np.ndarray, count: int | np.ndarray) -> None:
    """Merges every shard's mean and M2 ``[num_shards, 2, size]`` in shard order.

    ``count`` is the number of samples of every shard, or an array of one number per shard.
    """
    counts = np.broadcast_to(count, len(parts)).tolist()
    for n, (mean, m2) in zip(counts, parts, strict=True):
        if n:
            moments.merge(int(n), mean, m2)


class ObservationNormalizer:
    """Scales observations to zero mean and unit variance and clips them to ``±clip``."""

    def __init__(self, moments: RunningMoments, clip: float) -> None:
        self.moments, self._clip = moments, np.float32(clip)
        self.freeze()

    def freeze(self) -> None:
        """Uses the current moments until the next call."""
        self._mean = self.moments.mean.astype(np.float32)
        self._scale = (1.0 / np.sqrt(self.moments.variance + EPSILON)).astype(np.float32)

    @property
    def frozen(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The mean and the reciprocal standard deviation in use, float32 ``[size]``, and the clipping limit."""
        return self._mean, self._scale, float(self._clip)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Normalises float32 observations ``[…, size]``."""
        scaled = (observations - self._mean) * self._scale
        return np.clip(scaled, -self._clip, self._clip, out=scaled)


class RewardNormalizer:
    """Divides rewards by the standard deviation of the discounted return and clips them to ``±clip``.

    ``moments`` are those of the discounted return, size 1; ``running`` is each environment's discounted return so far,
    float64 ``[num_envs]``.
    """

    def __init__(self, moments: RunningMoments, clip: float, gamma: float, num_envs: int) -> None:
        self.moments, self._clip, self._gamma = moments, clip, gamma
        self.running = np.zeros(num_envs)

    def __call__(self, rewards: np.ndarray) -> np.ndarray:
        """Normalises float64 rewards ``[…]``."""
        return np.clip(rewards / np.sqrt(self.moments.variance[0] + EPSILON), -self._clip, self._clip)

    @np.errstate(over="ignore", invalid="ignore")
    def discounted_returns(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Returns the discounted return after each step, ``[T, num_envs]``; it restarts after a step that is done."""
        out = np.empty_like(rewards)
        running = self.running
        for t in range(len(rewards)):
            running = running * self._gamma + rewards[t]
            out[t] = running
            running = np.where(done[t], 0.0, running)
        self.running = running
        return out
