"""GRPO's groups: environments that begin each iteration in the same seeded state, one episode each."""

from __future__ import annotations

import numpy as np

from lockstep.config.run import Config
from lockstep.core.episodes import EPISODES_PER_ITERATION, first_episodes
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.state import TrainState


def begin_groups(state: TrainState, envs: HostEnvs) -> None:
    """Starts every environment anew: a group's members in the same state, keyed by (group, iteration)."""
    envs.buffers.episodes[:] = state.iteration * EPISODES_PER_ITERATION
    envs.reset()
    if state.recurrent_state is not None:
        state.recurrent_state[:] = 0.0


def finished_episodes(state: TrainState, rollout: Rollout, config: Config, plan: ShardPlan) -> np.ndarray:
    """Lists the episodes that ended in a rollout, float64 ``[n, 5]``: step, global env id, return, length, success.

    With GRPO each environment's first episode counts, also where the end of the rollout cut it.
    """
    if config.algorithm == "ppo":
        return state.counter.finished(rollout.scores, rollout.ended, plan.env_ids, rollout.successes, rollout.dead)
    return first_episodes(rollout.first_episodes, rollout.scores, rollout.successes, plan.env_ids)
