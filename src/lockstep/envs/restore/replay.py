"""Keeps the actions of live episodes, so that a seeded environment can be restored by replaying them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_MULTIPLIERS = np.random.Generator(np.random.Philox(key=0x10C557E9)).integers(
    0, 2**63, size=4096, dtype=np.uint64
) * np.uint64(2) + np.uint64(1)

CACHED_WORDS = 1 << 16
"""Words multiplied at a time, so that the products fit into a processor's cache, however large observations are."""


def _weights(size: int) -> np.ndarray:
    rounds = range(-(-size // _MULTIPLIERS.size))
    return np.concatenate([_MULTIPLIERS * np.uint64(2 * r + 1) for r in rounds])[:size]


def row_hashes(observations: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Returns a 64-bit multilinear hash of the bits of each row and its reward, uint64 ``[...]``.

    Rows ``[..., width]`` are float32, or bytes in whole words; rewards float64 ``[...]``.
    """
    bits = np.ascontiguousarray(observations).view(np.uint32)
    rewards_bits = np.ascontiguousarray(rewards, np.float64).view(np.uint64)
    width = bits.shape[-1]
    weights, rows = _weights(width + 1), bits.reshape(-1, width)
    sums, step = np.empty(len(rows), np.uint64), max(1, CACHED_WORDS // width)
    for start in range(0, len(rows), step):
        (rows[start : start + step] * weights[:-1]).sum(-1, out=sums[start : start + step])
    return sums.reshape(bits.shape[:-1]) + rewards_bits * weights[-1]


@dataclass
class LiveEpisode:
    """Actions and hashes of one environment's live episode; empty once it is longer than the limit."""

    actions: list[np.ndarray] = field(default_factory=list)
    hashes: list[np.ndarray] = field(default_factory=list)
    length: int = 0


class ReplayLog:
    """Keeps the actions and hashes of all local environments' live episodes that have at most ``limit`` steps."""

    def __init__(self, num_envs: int, limit: int) -> None:
        self._limit = limit
        self._live = [LiveEpisode() for _ in range(num_envs)]

    def extend(self, actions: np.ndarray, hashes: np.ndarray, done: np.ndarray) -> None:
        """Appends a rollout: actions ``[T, E, …]``, hashes uint64 ``[T, E]``, done ``[T, E]``; keeps live episodes."""
        steps = len(done)
        last_done = np.where(done.any(0), steps - 1 - np.argmax(done[::-1], axis=0), -1)
        for env, last in enumerate(last_done.tolist()):
            live = LiveEpisode() if last >= 0 else self._live[env]
            live.length += steps - 1 - last
            if live.length > self._limit:
                live.actions, live.hashes = [], []
            else:
                live.actions.append(actions[last + 1 :, env].copy())
                live.hashes.append(hashes[last + 1 :, env].copy())
            self._live[env] = live

    def actions(self, env: int, like: np.ndarray) -> np.ndarray:
        """Returns the actions ``[length, …]`` of an environment's live episode, as rows like those of ``like``."""
        parts = self._live[env].actions
        return np.concatenate(parts) if parts else np.empty((0, *like.shape[1:]), like.dtype)

    def hashes(self, env: int) -> np.ndarray:
        """Returns the hashes uint64 ``[length]`` of an environment's live episode."""
        parts = self._live[env].hashes
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def length(self, env: int) -> int:
        """Returns the number of steps of the live episode, kept or not."""
        return self._live[env].length

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, length: int) -> None:
        """Sets an environment's live episode."""
        self._live[env] = LiveEpisode([actions] if len(actions) else [], [hashes] if len(hashes) else [], length)

    def clear(self, env: int) -> None:
        """Forgets an environment's live episode, after a reset."""
        self._live[env] = LiveEpisode()
