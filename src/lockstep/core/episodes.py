"""Returns, lengths and successes of episodes, and the last hundred of them, the same for every world size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

WINDOW = 100
EPISODE_COLUMNS = 5
SUCCESS_RATE = "rollout/success_rate"
STATED = "rollout/metrics/"
"""Prefix of the metrics that environments report themselves."""
EPISODES_PER_ITERATION = 1 << 20
"""More episodes than can finish in one iteration: the key of an iteration's first episode is a multiple of it."""


EnvMetrics = Mapping[tuple[int, int], Mapping[str, float]]
"""Metrics that environments report for episodes that ended, by (step of the iteration, global env id)."""


class EpisodeCounter:
    """Counts the undiscounted returns (float64) and lengths of the live episodes of ``num_envs`` local environments."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)

    @np.errstate(over="ignore", invalid="ignore")  # a return too large for any number is infinite
    def finished(
        self,
        rewards: np.ndarray,
        done: np.ndarray,
        env_ids: range,
        successes: np.ndarray,
        dead: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the episodes that ended during a rollout.

        Args:
            rewards: float64 ``[T, E]``.
            done: bool ``[T, E]``.
            env_ids: global ids of the environments.
            successes: int8 ``[T, E]``: 1 task solved, -1 not solved, 0 not reported.
            dead: bool ``[T, E]``, entries that are no steps; None if all are.

        Returns:
            float64 ``[episodes, 5]``: step, global env id, return, length, success; ordered by step, then env id.
        """
        where, first = np.argwhere(done), 0
        ended: list[np.ndarray] = [np.zeros((2, 0))]
        steps = np.ones(done.shape, np.int64) if dead is None else 1 - dead.astype(np.int64)
        bounds = np.searchsorted(where[:, 0], np.arange(len(done) + 1)).tolist()
        for t, (start, end) in enumerate(pairwise(bounds)):
            if start < end:
                self._add(rewards[first : t + 1], steps[first : t + 1])
                first, envs = t + 1, where[start:end, 1]
                ended.append(np.array((self.returns[envs], self.lengths[envs])))
                self.returns[envs], self.lengths[envs] = 0.0, 0
        self._add(rewards[first:], steps[first:])
        ids, said = np.asarray(env_ids)[where[:, 1]], successes[where[:, 0], where[:, 1]]
        return np.column_stack([where[:, 0], ids, *np.concatenate(ended, 1), said]).astype(np.float64)

    def _add(self, rewards: np.ndarray, steps: np.ndarray) -> None:
        """Adds steps ``[t, E]`` one by one: a sum's bits must not depend on the number of local environments."""
        if len(rewards) == 1:
            self.returns = self.returns + rewards[0]
            self.lengths += steps[0]
        else:
            self.returns = np.add.accumulate(np.concatenate([self.returns[None], rewards]))[-1]
            self.lengths += steps.sum(0)

    def forget(self, env: int) -> None:
        """Restarts the count of an environment that was reset."""
        self.returns[env], self.lengths[env] = 0.0, 0


def finished_first_episodes(valid: np.ndarray, scores: np.ndarray, successes: np.ndarray, env_ids: range) -> np.ndarray:
    """Returns each environment's first episode of a rollout, even if the end of the rollout cut it.

    ``valid``, bool ``[T, E]``, marks the steps of an environment's first episode; ``scores``, float64 ``[T, E]``, are
    the rewards that count. The other arguments and the result are as in :meth:`EpisodeCounter.finished`.
    """
    lengths = valid.sum(0)
    returns = np.add.accumulate(np.where(valid, scores, 0.0))[-1]  # in order, as in `_add`
    said = successes[lengths - 1, np.arange(len(lengths))]
    table = np.stack([lengths - 1, np.asarray(env_ids), returns, lengths, said], 1).astype(np.float64)
    return table[np.lexsort((table[:, 1], table[:, 0]))]


@dataclass
class RecentEpisodes:
    """Holds return, length and success of the newest :data:`WINDOW` episodes, and the number of all episodes.

    A success is 1 (task solved), -1 (not solved) or 0 (not reported). ``env_metrics`` holds the environments' own
    metrics of the same episodes, empty where they report none.
    """

    window: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    total: int = 0
    env_metrics: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def extend(self, episodes: np.ndarray, env_metrics: EnvMetrics | None = None) -> None:
        """Appends an iteration's episodes ``[n, 5]`` of all ranks, sorted here by (step, env id)."""
        rows = episodes[np.lexsort((episodes[:, 1], episodes[:, 0]))][-WINDOW:]
        said = [env_metrics.get((int(t), int(env)), {}) for t, env, *_ in rows] if env_metrics else None
        self.extend_newest([(float(r), int(n), int(s)) for _, _, r, n, s in rows], len(episodes), said)

    def extend_newest(
        self,
        episodes: Sequence[tuple[float, int, int]],
        count: int,
        env_metrics: Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        """Appends the newest of an iteration's ``count`` episodes, in order; no more than :data:`WINDOW` are needed."""
        self.window.extend(episodes)
        self.env_metrics.extend(env_metrics or [{}] * len(episodes))
        self.total += count

    def metrics(self) -> dict[str, float | int | None]:
        """Returns the metrics of the window; None if no episode has ended yet.

        ``rollout/success_rate`` is there if an episode of the window reports success or failure. ``rollout/metrics/…``
        are means over the episodes that report the metric, in alphabetical order.
        """
        returns, lengths, successes = zip(*self.window, strict=True) if self.window else ((), (), ())
        out: dict[str, float | int | None] = {
            "rollout/episode_return_mean": sum(returns) / len(returns) if returns else None,
            "rollout/episode_return_min": min(returns, default=None),
            "rollout/episode_return_max": max(returns, default=None),
            "rollout/episode_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "rollout/episodes": self.total,
        }
        rate = success_rate(successes)
        out |= {} if rate is None else {SUCCESS_RATE: rate}
        for name in sorted({name for said in self.env_metrics for name in said}) if any(self.env_metrics) else ():
            values = [said[name] for said in self.env_metrics if name in said]
            out[f"{STATED}{name}"] = sum(values) / len(values)
        return out

    def to_json(self) -> dict:
        """Returns what ``state.json`` stores; floats survive exactly."""
        window = [[r, n, s] if s else [r, n] for r, n, s in self.window]
        metrics = {"metrics": [dict(said) for said in self.env_metrics]} if any(self.env_metrics) else {}
        return {"window": window, "total": self.total, **metrics}

    @classmethod
    def from_json(cls, value: dict) -> RecentEpisodes:
        """Restores what :meth:`to_json` returned; older checkpoints have no successes and no metrics."""
        out = cls(total=int(value["total"]))
        out.window.extend((float(r), int(n), int(s[0]) if s else 0) for r, n, *s in value["window"])
        out.env_metrics.extend(value.get("metrics") or [{}] * len(out.window))
        return out


def success_rate(successes: Sequence[float]) -> float | None:
    """Returns the share of successes (1) among the episodes that report one (1 or -1); None if none does."""
    said = [s > 0 for s in successes if s]
    return sum(said) / len(said) if said else None
