"""From a rollout to what the update trains on: values, log-probabilities, advantages and returns, shard by shard."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.advantages import gae, group_advantages
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.rollout import Rollout, aligned
from lockstep.torch_engine.setup.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState


@dataclass
class Batch:
    """Samples of the local shards, each ``[k, n, …]`` with ``n = num_steps * envs_per_shard``.

    With a recurrent policy samples come as sequences, ``[k, n / L, L, …]``.

    Attributes:
        observations: rows.
        actions: as :func:`lockstep.torch_engine.nets.distributions.sample` gives them; ``log_probs`` before the update.
        log_probs: see ``actions``.
        advantages: not normalised over minibatches yet.
        values: before the update, and ``returns`` what they should be; None without a critic.
        returns: see ``values``.
        valid: 1.0 where a sample counts, None where all do.
        reference_log_probs: of the actions under the reference policy.
        carry: what a recurrent policy carries into each sequence ``[k, n / L, carry_size]``.
        resets: 1.0 where an episode begins within a sequence.
    """

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    valid: Tensor | None = None
    reference_log_probs: Tensor | None = None
    carry: Tensor | None = None
    resets: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """What there is of them by name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: values for name, values in named if values is not None}


@dataclass
class Evaluation:
    """The policy's view of a rollout.

    Attributes:
        log_probs: of the actions, ``[k, T, rows]``.
        values: of all observations, the last one included, ``[k, T+1, rows]``; None without a critic.
        carries: what is carried after each step ``[k, T+1, rows, carry_size]``, of a recurrent policy.
    """

    log_probs: Tensor
    values: Tensor | None
    carries: Tensor | None = None


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


def to_sequences(x: Tensor, steps: int, length: int) -> Tensor:
    """``[k, T·rows, …]`` to sequences of one environment each, ``[k, T/L · rows, L, …]``."""
    k, samples = x.shape[:2]
    rows = samples // steps
    parts = x.view(k, steps // length, length, rows, *x.shape[2:]).transpose(2, 3)
    return parts.reshape(k, samples // length, length, *x.shape[2:])


def evaluate(state: TrainState, mode: Mode, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[k, n]`` of the actions, and values ``[k, m]`` of observations ``[k, m, width]``, m >= n.

    Without a critic the values are empty, ``[k, 0]``.
    """
    parameters, net, plain = state.parameters, state.net, state.plain

    def one_pass(x: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        if plain is not None:
            log_probs = plain.log_probs(x[:, : taken.shape[1]].clone().numpy(), taken.numpy())
            return torch.from_numpy(log_probs), torch.from_numpy(plain.values(x.numpy()))
        weights = parameters.expanded(len(x))
        acted = x[:, : taken.shape[1]].clone()
        if net.shared or net.custom is not None or not net.critic:
            output, values = nets.actor_critic(net, weights, x)
            output = output[:, : taken.shape[1]]
        else:
            output, values = nets.actor(net, weights, acted), nets.critic(net, weights, x)
        log_prob = distributions.log_prob_and_entropy(net, weights, output, taken)[0]
        return log_prob, log_prob[:, :0] if values is None else values

    return by_shard(mode, one_pass, observations, actions)


def unroll(
    state: TrainState, mode: Mode, observations: Tensor, actions: Tensor, carry: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`evaluate` for a recurrent policy, over whole rollouts.

    Args:
        state: with the networks.
        mode: how shards are called.
        observations: ``[k, T+1, rows, width]``.
        actions: ``[k, T, rows, …]``.
        carry: ``[k, rows, carry_size]`` before the first step.
        resets: ``[k, T+1, rows]``.

    Returns:
        Log-probabilities ``[k, T, rows]``, values ``[k, T+1, rows]`` (or empty), carries ``[k, T+1, rows, …]``.
    """
    parameters, net = state.parameters, state.net

    def one_pass(x: Tensor, taken: Tensor, first: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = parameters.expanded(len(x))
        output, values, carries = nets.unroll(net, weights, x, first, begins)
        log_prob = distributions.log_prob_and_entropy(net, weights, output[:, :-1], taken)[0]
        return log_prob, log_prob[:, :0] if values is None else values, carries

    return by_shard(mode, one_pass, observations, actions, carry, resets)


def evaluate_rollout(
    state: TrainState, mode: Mode, observations: Tensor, actions: Tensor, resets: Tensor, steps: int
) -> Evaluation:
    """Log-probabilities and values of a rollout; arguments ``[k, T(+1)·rows, …]``."""
    k = len(observations)
    if not state.net.core:
        log_probs, values = evaluate(state, mode, observations, actions)
        seen = values.view(k, steps + 1, -1) if state.net.critic else None
        return Evaluation(log_probs.view(k, steps, -1), seen)
    assert state.carry is not None
    shaped = [x.unflatten(1, (steps + extra, -1)) for x, extra in ((observations, 1), (actions, 0), (resets, 1))]
    carry = torch.from_numpy(state.carry).to(observations.device).view(k, -1, state.net.carry_size)
    log_probs, values, carries = unroll(state, mode, shaped[0], shaped[1], carry, shaped[2])
    return Evaluation(log_probs, values if state.net.critic else None, carries)


def final_values(
    state: TrainState, rollout: Rollout, evaluation: Evaluation, plan: ShardPlan, device: torch.device
) -> dict[tuple[int, int], float]:
    """V of the observations that truncated an episode, always in blocks of ``envs_per_shard`` rows of one shard."""
    rows, layout = plan.envs_per_shard, state.net.observation
    weights = state.parameters.expanded(1)
    out: dict[tuple[int, int], float] = {}
    for shard in range(plan.local_num_shards):
        keys = sorted(key for key in rollout.final if key[1] // rows == shard)
        for start in range(0, len(keys), rows):
            chunk = keys[start : start + rows]
            block = np.zeros((1, rows, layout.width), layout.dtype)
            block[0, : len(chunk)] = [rollout.final[key] for key in chunk]
            observed = aligned(block, device)
            if state.plain is not None:
                values = torch.from_numpy(state.plain.values(block)[0])
            elif evaluation.carries is None:
                values = nets.critic(state.net, weights, observed)[0]
            else:
                carry = torch.zeros((1, rows, state.net.carry_size), device=device)
                carry[0, : len(chunk)] = torch.stack([evaluation.carries[shard, t, e % rows] for t, e in chunk])
                still = torch.zeros((1, 1, rows), device=device)
                seen = nets.unroll(state.net, weights, observed.unsqueeze(1), carry, still)[1]
                assert seen is not None
                values = seen[0, 0]
            out.update(zip(chunk, values[: len(chunk)].tolist(), strict=True))
    return out


def _begins(rollout: Rollout, shards: int, device: torch.device) -> Tensor:
    """1.0 where an observation begins an episode, ``[k, (T+1)·rows]``; what is before the rollout isn't asked."""
    resets = torch.from_numpy(rollout.resets).to(device).float()
    return to_shards(torch.cat([torch.zeros_like(resets[:1]), resets]), shards)


def _carry_on(state: TrainState, evaluation: Evaluation, done: np.ndarray) -> None:
    """Keep what the recurrent policy carries into the next rollout; nothing into an episode that begins there."""
    if evaluation.carries is None:
        return
    last = evaluation.carries[:, -2].flatten(0, 1).cpu().numpy().copy()
    last[done[-1]] = 0.0
    state.carry = last


@torch.no_grad()
def make_batch(state: TrainState, rollout: Rollout, plan: ShardPlan, config: Config, mode: Mode) -> Batch:
    """Values, log-probabilities, advantages and returns of a rollout."""
    device, shards, steps = state.parameters.flat.device, plan.local_num_shards, config.num_steps
    observations = to_shards(aligned(rollout.observations, device), shards)
    actions = to_shards(torch.as_tensor(rollout.actions).to(device), shards)
    begins = _begins(rollout, shards, device)
    evaluation = evaluate_rollout(state, mode, observations, actions, begins, steps)
    samples = actions.shape[1]
    batch = Batch(
        observations=observations[:, :samples],
        actions=actions,
        log_probs=evaluation.log_probs.flatten(1),
        advantages=torch.empty(0),
    )
    rewards = rollout.rewards if state.rewards is None else state.rewards(rollout.rewards)
    rewarded, terminated = (torch.from_numpy(x.astype(np.float32)).to(device) for x in (rewards, rollout.terminated))
    if config.algorithm == "grpo":
        add_group_advantages(batch, state, rollout, plan, config, mode)
    else:
        finals = final_values(state, rollout, evaluation, plan, device)
        done = torch.from_numpy(rollout.done).to(device).float()
        add_advantages(batch, evaluation, finals, rewarded, terminated, done, config)
        if rollout.dead is not None:
            batch.valid = to_shards(torch.from_numpy(~rollout.dead).to(device).float(), shards)
    if state.net.core:
        batch = in_sequences(batch, evaluation, begins[:, :samples], state, config)
    _carry_on(state, evaluation, rollout.resets)
    return batch


def add_advantages(
    batch: Batch,
    evaluation: Evaluation,
    finals: dict[tuple[int, int], float],
    rewards: Tensor,
    terminated: Tensor,
    done: Tensor,
    config: Config,
) -> None:
    """PPO: generalised advantages and the returns that the critic is trained on."""
    assert evaluation.values is not None
    shards, steps = len(evaluation.values), config.num_steps
    values = from_shards(evaluation.values.flatten(1), steps + 1)
    next_values = values[1:].clone()
    for (t, env), value in finals.items():
        next_values[t, env] = value
    gamma, gae_lambda = config.ppo.gamma, config.ppo.gae_lambda
    advantages, returns = gae(rewards, values[:-1], next_values, terminated, done, gamma, gae_lambda)
    batch.advantages, batch.returns = to_shards(advantages, shards), to_shards(returns, shards)
    batch.values = evaluation.values[:, :-1].flatten(1)


def add_group_advantages(
    batch: Batch, state: TrainState, rollout: Rollout, plan: ShardPlan, config: Config, mode: Mode
) -> None:
    """GRPO: each environment's first episode of the rollout against its group's; what follows doesn't count."""
    device, shards = state.parameters.flat.device, plan.local_num_shards
    valid = rollout.first_episodes
    returns = np.where(valid, rollout.rewards, 0.0).sum(0).reshape(-1, config.grpo.group_size)
    per_env = group_advantages(torch.from_numpy(returns).to(device), config.grpo.normalize_std).flatten()
    counted = torch.from_numpy(valid).to(device).float()
    batch.advantages = to_shards(per_env.float() * counted, shards)
    batch.valid = to_shards(counted, shards)
    if state.reference is not None:
        kept, state.parameters = state.parameters, state.reference
        try:
            batch.reference_log_probs = evaluate_again(state, batch, rollout, mode, config)
        finally:
            state.parameters = kept


def evaluate_again(state: TrainState, batch: Batch, rollout: Rollout, mode: Mode, config: Config) -> Tensor:
    """Log-probabilities ``[k, n]`` of a batch's actions under the state's parameters."""
    shards, device = len(batch.actions), batch.actions.device
    observations = to_shards(aligned(rollout.observations, device), shards)
    begins = _begins(rollout, shards, device)
    evaluation = evaluate_rollout(state, mode, observations, batch.actions, begins, config.num_steps)
    return evaluation.log_probs.flatten(1)


def in_sequences(batch: Batch, evaluation: Evaluation, begins: Tensor, state: TrainState, config: Config) -> Batch:
    """The same batch as sequences, with what was carried into each of them."""
    assert evaluation.carries is not None
    assert state.carry is not None
    steps, length = config.num_steps, config.sequence_length
    k, _, rows, width = evaluation.carries.shape
    first = torch.from_numpy(state.carry).to(batch.actions.device).view(k, 1, rows, width)
    carry = torch.cat([first, evaluation.carries[:, length - 1 : steps - 1 : length]], 1)
    cut = {name: to_sequences(x.contiguous(), steps, length) for name, x in batch.columns().items()}
    return Batch(**cut, carry=carry.flatten(1, 2), resets=to_sequences(begins.contiguous(), steps, length))
