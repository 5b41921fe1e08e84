"""GRPO's groups: environments that begin each iteration in the same seeded state, one episode each."""

from __future__ import annotations

import numpy as np

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.state import TrainState

EPISODES_PER_ITERATION = 1 << 20
"""More than an environment can finish in one iteration: the key of an iteration's first episode is a multiple."""


def begin_groups(state: TrainState, envs: HostEnvs) -> None:
    """Start every environment anew: a group's members in the same state, keyed by (group, iteration)."""
    envs.buffers.episodes[:] = state.iteration * EPISODES_PER_ITERATION
    envs.reset()
    if state.carry is not None:
        state.carry[:] = 0.0


def finished_episodes(state: TrainState, rollout: Rollout, config: Config, plan: ShardPlan) -> np.ndarray:
    """Episodes that ended in a rollout, float64 ``[n, 5]``: step, global env id, return, length, success.

    With GRPO each environment's first episode counts, also where the end of the rollout cut it.
    """
    if config.algorithm == "ppo":
        return state.counter.finished(rollout.scores, rollout.ended, plan.env_ids, rollout.successes, rollout.dead)
    valid = rollout.first_episodes
    lengths = valid.sum(0)
    returns = np.where(valid, rollout.scores, 0.0).sum(0)
    successes = rollout.successes[lengths - 1, np.arange(len(lengths))]
    table = np.stack([lengths - 1, np.asarray(plan.env_ids), returns, lengths, successes], 1).astype(np.float64)
    return table[np.lexsort((table[:, 1], table[:, 0]))]
