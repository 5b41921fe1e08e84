"""Evaluation: whole episodes with keyed starts, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.envs.vector import HostEnvs


def run_episodes(envs: HostEnvs, act: Callable[[np.ndarray], np.ndarray], max_steps: int) -> np.ndarray:
    """One episode in each environment, stepped together in a batch of fixed shape.

    Args:
        envs: environments made for evaluation, one an episode.
        act: observations float32 ``[E, size]`` to actions ``[E]`` or ``[E, A]``.
        max_steps: longer episodes are cut here.

    Returns:
        float64 ``[E, 2]``: return and length.
    """
    b = envs.buffers
    envs.reset()
    out, live = np.zeros((envs.num_envs, 2)), np.ones(envs.num_envs, np.bool_)
    for _ in range(max_steps):
        b.actions[:] = act(b.observations)
        envs.step()
        out[live] += np.stack([b.rewards[live], np.ones(live.sum())], 1)
        live &= ~(b.terminated | b.truncated)
        if not live.any():
            break
    return out


def summarize(episodes: np.ndarray) -> dict[str, float | int]:
    """Mean, standard deviation, least and greatest return, and mean length, of ``[n, 2]`` episodes in order."""
    returns, lengths = episodes[:, 0], episodes[:, 1]
    return {
        "episodes": len(episodes),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
    }
