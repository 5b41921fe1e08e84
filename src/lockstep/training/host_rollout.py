"""What both engines do with environments that are stepped on the host: begin groups, list episodes."""

from __future__ import annotations

import numpy as np

from lockstep.config.run import Config
from lockstep.core.episodes import EPISODES_PER_ITERATION, EpisodeCounter, finished_first_episodes
from lockstep.envs.host_envs import HostEnvs


def first_episodes(ended: np.ndarray) -> np.ndarray:
    """Marks the steps of each environment's first episode in a rollout, given its ends; bool ``[T, E]`` both."""
    return np.cumsum(ended, 0) - ended == 0


def begin_groups(envs: HostEnvs, iteration: int) -> None:
    """Resets every environment; the members of a group start in the same state, keyed by (group, iteration)."""
    envs.buffers.episodes[:] = iteration * EPISODES_PER_ITERATION
    envs.reset()


def finished_episodes(
    config: Config,
    counter: EpisodeCounter,
    scores: np.ndarray,
    ended: np.ndarray,
    successes: np.ndarray,
    env_ids: range,
    dead: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the episodes that ended in a rollout, float64 ``[n, 5]``: step, global env id, return, length, success.

    The arguments are those of :meth:`.EpisodeCounter.finished`. With GRPO each environment's first episode counts, even
    if the end of the rollout cut it.
    """
    if config.algorithm == "ppo":
        return counter.finished(scores, ended, env_ids, successes, dead)
    return finished_first_episodes(first_episodes(ended), scores, successes, env_ids)
