"""From a rollout to what the update trains on: values, log-probabilities, advantages and returns, shard by shard."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.shards import ShardPlan
from lockstep.torch_engine import nets
from lockstep.torch_engine.advantages import gae
from lockstep.torch_engine.rollout import Rollout, aligned
from lockstep.torch_engine.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState


@dataclass
class Batch:
    """Samples of the local shards, each ``[k, n, …]`` with ``n = num_steps * envs_per_shard``."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in the order of the fields."""
        return tuple(getattr(self, f.name) for f in fields(self))


def to_shards(x: Tensor, num_shards: int) -> Tensor:
    """``[T, k·rows, …]`` to one contiguous block per shard: ``[k, T·rows, …]``."""
    steps, envs = x.shape[:2]
    rows = envs // num_shards
    parts = x.view(steps, num_shards, rows, *x.shape[2:]).transpose(0, 1)
    return parts.reshape(num_shards, steps * rows, *x.shape[2:])


def from_shards(x: Tensor, steps: int) -> Tensor:
    """The reverse of :func:`to_shards`: ``[k, T·rows]`` to ``[T, k·rows]``."""
    shards = len(x)
    return x.view(shards, steps, -1).transpose(0, 1).reshape(steps, -1)


def evaluate(state: TrainState, mode: Mode, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[k, n]`` of the actions, and values ``[k, m]`` of observations ``[k, m, size]``, m >= n."""
    parameters, net = state.parameters, state.net

    def one_pass(x: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        weights = parameters.expanded(len(x))
        output = nets.actor(net, weights, x[:, : taken.shape[1]].clone())
        return nets.log_prob_and_entropy(net, weights, output, taken)[0], nets.critic(net, weights, x)

    return by_shard(mode, one_pass, observations, actions)


def final_values(
    state: TrainState, rollout: Rollout, plan: ShardPlan, device: torch.device
) -> dict[tuple[int, int], float]:
    """V of the observations that truncated an episode, always in blocks of ``envs_per_shard`` rows of one shard."""
    rows = plan.envs_per_shard
    weights = state.parameters.expanded(1)
    out: dict[tuple[int, int], float] = {}
    for shard in range(plan.local_num_shards):
        keys = sorted(key for key in rollout.final if key[1] // rows == shard)
        for start in range(0, len(keys), rows):
            chunk = keys[start : start + rows]
            block = np.zeros((1, rows, state.net.observation_size), np.float32)
            block[0, : len(chunk)] = [rollout.final[key] for key in chunk]
            values = nets.critic(state.net, weights, aligned(block, device))[0, : len(chunk)].tolist()
            out.update(zip(chunk, values, strict=True))
    return out


@torch.no_grad()
def make_batch(state: TrainState, rollout: Rollout, plan: ShardPlan, config: Config, mode: Mode) -> Batch:
    """Values, log-probabilities, advantages and returns of a rollout."""
    device, shards, steps = state.parameters.flat.device, plan.local_num_shards, config.num_steps
    observations = to_shards(aligned(rollout.observations, device), shards)
    actions = to_shards(torch.from_numpy(rollout.actions).to(device), shards)
    log_probs, all_values = evaluate(state, mode, observations, actions)
    values = from_shards(all_values, steps + 1)
    next_values = values[1:].clone()
    for (t, env), value in final_values(state, rollout, plan, device).items():
        next_values[t, env] = value
    rewards = rollout.rewards if state.rewards is None else state.rewards(rollout.rewards)
    advantages, returns = gae(
        torch.from_numpy(rewards.astype(np.float32)).to(device),
        values[:-1],
        next_values,
        torch.from_numpy(rollout.terminated).to(device).float(),
        torch.from_numpy(rollout.done).to(device).float(),
        config.ppo.gamma,
        config.ppo.gae_lambda,
    )
    return Batch(
        observations=observations[:, : log_probs.shape[1]],
        actions=actions,
        log_probs=log_probs,
        values=to_shards(values[:-1], shards),
        advantages=to_shards(advantages, shards),
        returns=to_shards(returns, shards),
    )
