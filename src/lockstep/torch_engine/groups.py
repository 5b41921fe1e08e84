"""GRPO's groups: environments that begin each iteration in the same seeded state, one episode each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.episodes import EPISODES_PER_ITERATION, finished_first_episodes
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.torch_engine.advantages import group_advantages
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup.accelerator import to_device
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
    return finished_first_episodes(rollout.first_episodes, rollout.scores, rollout.successes, plan.env_ids)


def group_columns(rollout: Rollout, config: Config, device: torch.device) -> dict[str, Tensor]:
    """Compares each environment's first episode with its group's: ``advantages`` and ``valid``, float32 ``[T, E]``.

    What follows the first episode doesn't count.
    """
    valid = rollout.first_episodes
    returns = np.where(valid, rollout.rewards, 0.0).sum(0).reshape(-1, config.grpo.group_size)
    per_env = to_device(
        group_advantages(torch.from_numpy(returns), config.grpo.normalize_std).flatten().numpy(), device
    )
    counted = to_device(valid, device).float()
    return {"advantages": per_env.float() * counted, "valid": counted}
