"""GRPO's groups: their environments begin each iteration in the same seeded state and count one episode each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.torch_engine.advantages import group_advantages
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup.accelerator import to_device
from lockstep.torch_engine.state import TrainState
from lockstep.training import host_rollout


def begin_groups(state: TrainState, envs: HostEnvs) -> None:
    """Starts every environment anew (see :func:`.host_rollout.begin_groups`), with a recurrent state of 0."""
    host_rollout.begin_groups(envs, state.iteration)
    if state.recurrent_state is not None:
        state.recurrent_state[:] = 0.0


def finished_episodes(state: TrainState, rollout: Rollout, config: Config, plan: ShardPlan) -> np.ndarray:
    """Lists the episodes that ended in a rollout; see :func:`.host_rollout.finished_episodes`."""
    return host_rollout.finished_episodes(
        config, state.counter, rollout.scores, rollout.ended, rollout.successes, plan.env_ids, rollout.dead
    )


def group_columns(rollout: Rollout, config: Config, device: torch.device) -> dict[str, Tensor]:
    """Compares each environment's first episode with its group's: ``advantages`` and ``valid``, float32 ``[T, E]``.

    Steps after the first episode don't count.
    """
    valid = rollout.first_episodes
    rewards = np.where(valid, rollout.rewards, 0.0)
    returns, magnitudes = (
        torch.from_numpy(x.sum(0).reshape(-1, config.grpo.group_size)) for x in (rewards, np.abs(rewards))
    )
    advantages = group_advantages(returns, magnitudes, config.grpo.normalize_std)
    per_env = to_device(advantages.flatten().numpy(), device)
    counted = to_device(valid, device).float()
    return {"advantages": per_env.float() * counted, "valid": counted}
