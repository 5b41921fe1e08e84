"""Evaluation: whole episodes with keyed starts, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.core.episodes import success_rate
from lockstep.envs.host_envs import HostEnvs

COLUMNS = 4
"""Of an evaluation's table: return, length, success, score."""


def run_episodes(envs: HostEnvs, act: Callable[[np.ndarray], np.ndarray], max_steps: int) -> np.ndarray:
    """One episode in each environment, stepped together in a batch of fixed shape.

    Args:
        envs: environments made for evaluation, one an episode.
        act: observations float32 ``[E, size]`` to actions ``[E]`` or ``[E, A]``.
        max_steps: longer episodes are cut here.

    Returns:
        float64 ``[E, 4]``: return, length, success (1 task solved, -1 not solved, 0 not said), and score (points of
        the game at its end, NaN if it has none).
    """
    b = envs.buffers
    envs.reset()
    out, live = np.zeros((envs.num_envs, COLUMNS)), np.ones(envs.num_envs, np.bool_)
    for _ in range(max_steps):
        b.actions[:] = act(b.observations)
        envs.step()
        out[live, 0] += b.rewards[live]
        out[live, 1] += 1
        out[live, 2] = b.successes[live]
        out[live, 3] = b.scores[live]
        live &= ~(b.terminated | b.truncated)
        if not live.any():
            break
    return out


def success_of(value: float) -> bool | None:
    """A success as it stands in a table: solved, not solved, or None where nothing was said."""
    return None if value == 0 else value > 0


def summarize(episodes: np.ndarray) -> dict[str, float | int]:
    """Mean, standard deviation, least and greatest return, and mean length, of ``[n, 4]`` episodes in order.

    ``success_rate`` is there if an episode says whether it succeeded, ``score_mean`` and its like if all have a score.
    """
    returns, lengths = episodes[:, 0], episodes[:, 1]
    out: dict[str, float | int] = {
        "episodes": len(episodes),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
    }
    rate = success_rate(episodes[:, 2].tolist())
    if rate is not None:
        out["success_rate"] = rate
    scores = episodes[:, 3]
    if not np.isnan(scores).any():
        out |= {"score_mean": float(scores.mean()), "score_std": float(scores.std())}
        out |= {"score_min": float(scores.min()), "score_max": float(scores.max())}
    return out
