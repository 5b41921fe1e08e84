"""Draws random numbers of many environments at once, as functions of a key and a counter.

SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), whose n-th output is a function of
n: one hash for all environments, where making a Philox generator for each would take longer than their step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.core.shards import keyed_generator

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
STEP_BITS = 32
"""Bits of a counter that count the steps of an episode."""


def stream_keys(seed: int, purpose: str, keys: Sequence[int]) -> np.ndarray:
    """A key of 64 bits for each environment, uint64 ``[n]``, of what stands for it in the keys of its resets."""
    return np.array([keyed_generator(seed, purpose, key).integers(2**64, dtype=np.uint64) for key in keys], np.uint64)


def uniform(keys: np.ndarray, episodes: np.ndarray, steps: np.ndarray, draws: int) -> np.ndarray:
    """Uniform in [0, 1), float32 ``[n, draws]``: a function of each environment's key, episode and step.

    Args:
        keys: uint64 ``[n]``.
        episodes: int64 ``[n]``; ``steps`` likewise, below 2³².
        steps: see ``episodes``.
        draws: numbers per environment.
    """
    counters = (episodes.astype(np.uint64) << np.uint64(STEP_BITS)) + steps.astype(np.uint64)
    columns = np.arange(1, draws + 1, dtype=np.uint64)
    x = keys[:, None] + (counters[:, None] * np.uint64(draws) + columns) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
