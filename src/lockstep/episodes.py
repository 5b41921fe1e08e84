"""Returns and lengths of episodes, and the last hundred of them, the same for every world size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

WINDOW = 100


class EpisodeCounter:
    """Undiscounted returns (float64) and lengths of the live episodes of ``num_envs`` local environments."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)

    def finished(self, rewards: np.ndarray, done: np.ndarray, env_ids: range) -> np.ndarray:
        """Episodes that ended during a rollout.

        Args:
            rewards: float64 ``[T, E]``.
            done: bool ``[T, E]``.
            env_ids: global ids of the environments.

        Returns:
            float64 ``[episodes, 4]``: step, global env id, return, length; by step, then env id.
        """
        rows = []
        for t in range(len(rewards)):
            self.returns += rewards[t]
            self.lengths += 1
            for env in np.flatnonzero(done[t]):
                rows.append((t, env_ids[env], self.returns[env], self.lengths[env]))
                self.returns[env], self.lengths[env] = 0.0, 0
        return np.array(rows, np.float64).reshape(-1, 4)

    def forget(self, env: int) -> None:
        """Start an environment's count anew: it was reset."""
        self.returns[env], self.lengths[env] = 0.0, 0


@dataclass
class RecentEpisodes:
    """Return and length of the newest :data:`WINDOW` episodes, and how many there were in all."""

    window: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    total: int = 0

    def extend(self, episodes: np.ndarray) -> None:
        """Append an iteration's episodes ``[n, 4]`` of all ranks, by (step, env id) whatever order they come in."""
        order = np.lexsort((episodes[:, 1], episodes[:, 0]))
        self.window.extend((float(r), int(n)) for _, _, r, n in episodes[order])
        self.total += len(episodes)

    def metrics(self) -> dict[str, float | int | None]:
        """Mean return and length over the window; None as long as no episode has ended."""
        returns = [r for r, _ in self.window]
        lengths = [n for _, n in self.window]
        return {
            "rollout/episode_return_mean": sum(returns) / len(returns) if returns else None,
            "rollout/episode_return_min": min(returns, default=None),
            "rollout/episode_return_max": max(returns, default=None),
            "rollout/episode_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "rollout/episodes": self.total,
        }

    def to_json(self) -> dict:
        """What ``state.json`` holds; floats survive exactly."""
        return {"window": [list(pair) for pair in self.window], "total": self.total}

    @classmethod
    def from_json(cls, value: dict) -> RecentEpisodes:
        """The reverse of :meth:`to_json`."""
        out = cls(total=int(value["total"]))
        out.window.extend(_pairs(value["window"]))
        return out


def _pairs(rows: Iterable[list]) -> Iterable[tuple[float, int]]:
    return ((float(r), int(n)) for r, n in rows)
