"""What both engines do with environments that are stepped on the host: begin groups, act at random, list episodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.config.run import Config
from lockstep.core.episodes import EPISODES_PER_ITERATION, EpisodeCounter, finished_first_episodes
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.envs.gymnasium.random_policy import allowed_actions, random_actions, random_replacements
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import check_acted


def first_episodes(ended: np.ndarray) -> np.ndarray:
    """Marks the steps of each environment's first episode in a rollout, given its ends; bool ``[T, E]`` both."""
    return np.cumsum(ended, 0) - ended == 0


def begin_groups(envs: HostEnvs, iteration: int) -> None:
    """Resets every environment; the members of a group start in the same state, keyed by (group, iteration)."""
    envs.buffers.episodes[:] = iteration * EPISODES_PER_ITERATION
    envs.reset()


def random_steps(
    config: Config, plan: ShardPlan, envs: HostEnvs, raw: np.ndarray, dead: np.ndarray | None = None
) -> Iterator[int]:
    """Takes a rollout's steps of random actions, and then starts new episodes; yields the number of each step taken.

    Args:
        config: of the run.
        plan: which shards and environments this rank owns.
        envs: steps the environments.
        raw: where the observations before each step are put, ``[T or more, E, width]``.
        dead: bool ``[T, E]``, steps that only begin an episode, which the caller fills; None: there are none.
    """
    observation, action, b = envs.description.observation, envs.description.action, envs.buffers
    actions, replacements = random_actions(config, plan, action), random_replacements(config, plan, action)
    for t in range(config.num_steps):
        raw[t] = b.observations
        b.actions[...] = allowed_actions(observation, action, b.observations, actions[t], replacements[t])
        try:
            envs.step()
        except EnvironmentFailureError:
            check_acted(envs.description, envs.env_ids, raw[: t + 1], -1, dead=dead)
            raise
        life.progressed()
        yield t
    b.episodes += 1
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
