"""Turns a rollout into what the update trains on: values, log-probabilities, advantages and returns of each shard."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.advantages import gae
from lockstep.torch_engine.groups import group_columns
from lockstep.torch_engine.nets.functions import PolicyFunctions, PolicyOutputs
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.shards import Mode, by_shard, from_shards, laid_out, to_sequences, to_shards
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup.accelerator import to_device
from lockstep.torch_engine.state import TrainState


@dataclass
class Batch:
    """Holds the samples of the local shards, each array ``[k, n, …]`` with ``n = num_steps * envs_per_shard``.

    With a recurrent policy the samples are cut into sequences of ``L`` steps, ``[k, n / L, L, …]``.

    Attributes:
        actions: in the form of :func:`lockstep.torch_engine.nets.distributions.sample`.
        log_probs: of the actions, before the update.
        advantages: not normalised over minibatches yet.
        values: before the update; ``returns`` are the critic's targets. Both are None without a critic.
        valid: 1.0 where a sample counts; None if all count.
        reference_log_probs: of the actions, under the reference policy.
        recurrent_state: of a recurrent policy before each sequence, ``[k, n / L, size]``.
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
    recurrent_state: Tensor | None = None
    resets: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Returns the arrays that are not None, by name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: values for name, values in named if values is not None}


def policy_outputs(
    policy: PolicyFunctions,
    mode: Mode,
    observations: Tensor,
    actions: Tensor,
    resets: Tensor,
    recurrent_state: np.ndarray | Tensor | None,
    steps: int,
) -> PolicyOutputs:
    """Computes log-probabilities and values of a rollout of ``T`` steps.

    ``observations`` are ``[k, (T+1)·rows, width]``, ``actions`` ``[k, T·rows, …]`` and ``resets`` ``[k, (T+1)·rows]``,
    1.0 where an observation begins an episode. ``recurrent_state`` is the one before the rollout, float32
    ``[E, size]``, or None.
    """
    k = len(observations)
    if recurrent_state is None:
        log_probs, values = by_shard(mode, policy.evaluate, observations, actions)
        return PolicyOutputs(log_probs.view(k, steps, -1), values.view(k, steps + 1, -1) if values.numel() else None)
    shaped = [x.unflatten(1, (steps + extra, -1)) for x, extra in ((observations, 1), (actions, 0), (resets, 1))]
    state = torch.as_tensor(recurrent_state).to(observations.device).view(k, shaped[0].shape[2], -1)
    log_probs, values, states = by_shard(mode, policy.unroll, shaped[0], shaped[1], state, shaped[2])
    return PolicyOutputs(log_probs, values if values.numel() else None, states)


def bootstrap_values(state: TrainState, rollout: Rollout, outputs: PolicyOutputs, plan: ShardPlan) -> Tensor:
    """Computes V of what followed each step, ``[T, E]``; of the final observation where an episode was truncated.

    Final observations are evaluated in blocks of ``envs_per_shard`` rows of one shard, however many there are. Where a
    simulator gave none (``rollout.final_missing``), the observation before the step stands in for it. A recurrent
    policy must not see that one twice, so its value is taken from the first pass.
    """
    assert outputs.values is not None
    rows, told = plan.envs_per_shard, rollout.truncated
    ordinary = from_shards(outputs.values.flatten(1), len(rollout.rewards) + 1)
    out = ordinary[1:].clone()
    if rollout.final_missing is not None and state.net.core is not None:
        told = told & ~rollout.final_missing
        steps, envs = (to_device(index, out.device) for index in np.nonzero(rollout.final_missing))
        out[steps, envs] = ordinary[steps, envs]
    if not len(rollout.final) or not told.any():
        return out
    steps, envs = np.nonzero(rollout.truncated)  # of each row of ``final``
    places = np.flatnonzero(told[steps, envs])
    places = places[np.argsort(envs[places] // rows, kind="stable")]  # shard by shard
    final, shards = rollout.final_rows(places), envs[places] // rows
    steps, envs = (to_device(index[places], out.device) for index in (steps, envs))
    values, states = out.new_empty(len(places)), outputs.recurrent_states
    for shard in range(plan.local_num_shards):
        first, after = np.searchsorted(shards, (shard, shard + 1)).tolist()
        for start in range(first, after, rows):
            chunk = slice(start, min(start + rows, after))
            carried = None
            if states is not None:
                carried = _filled_up(states[shard, steps[chunk], envs[chunk] % rows].float(), rows)
            found = state.policy.values(_filled_up(final[chunk], rows), carried)
            values[chunk] = found[: chunk.stop - start]
    out[steps, envs] = values
    return out


def _filled_up(x: Any, rows: int) -> Any:
    """Copies an array or a tensor ``[n, …]`` into one shard's ``[1, rows, …]`` and fills the rest with 0."""
    shape = (1, rows, *x.shape[1:])
    out = np.zeros(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(shape)
    out[0, : len(x)] = x
    return out


def _begins(rollout: Rollout, shards: int, device: torch.device) -> Tensor:
    """Returns 1.0 where an observation begins an episode within the rollout, else 0.0, ``[k, (T+1)·rows]``."""
    resets = to_device(rollout.resets, device).float()
    return to_shards(torch.cat([torch.zeros_like(resets[:1]), resets]), shards)


def _carry_on(state: TrainState, outputs: PolicyOutputs, done: np.ndarray) -> None:
    """Stores the recurrent state for the next rollout, 0 where an episode begins there."""
    if outputs.recurrent_states is None:
        return
    last = outputs.recurrent_states[:, -2].flatten(0, 1)
    if on_host(last.device):
        state.recurrent_state = last.numpy().copy()
        state.recurrent_state[done[-1]] = 0.0
    else:
        state.recurrent_state = torch.where(to_device(done[-1], last.device).unsqueeze(1), 0.0, last)


@torch.no_grad()
def make_batch(state: TrainState, rollout: Rollout, plan: ShardPlan, config: Config, mode: Mode) -> Batch:
    """Computes values, log-probabilities, advantages and returns of a rollout; stores the recurrent state after it."""
    device, shards, steps = state.parameters.flat.device, plan.local_num_shards, config.num_steps
    # contiguous: else strides depend on the number of shards, and a matrix product's bits may depend on strides
    observations, actions = rollout.tensors(device)
    observations, actions = laid_out(observations, shards), to_shards(actions, shards).contiguous()
    begins = _begins(rollout, shards, device)
    outputs = policy_outputs(state.policy, mode, observations, actions, begins, state.recurrent_state, steps)
    samples = actions.shape[1]
    batch = Batch(
        observations=observations[:, :samples],
        actions=actions,
        log_probs=outputs.log_probs.flatten(1),
        advantages=torch.empty(0),
    )
    if config.algorithm == "grpo":
        columns = group_columns(rollout, config, device)
        batch.advantages, batch.valid = (to_shards(columns[name], shards) for name in ("advantages", "valid"))
        if state.reference is not None:
            given = (observations, actions, begins, state.recurrent_state, steps)
            batch.reference_log_probs = policy_outputs(state.reference, mode, *given).log_probs.flatten(1)
    else:
        add_advantages(batch, state, rollout, outputs, plan, config)
    if outputs.recurrent_states is not None:
        batch = in_sequences(batch, outputs, begins[:, :samples], state, config)
    _carry_on(state, outputs, rollout.resets)
    return batch


def add_advantages(
    batch: Batch, state: TrainState, rollout: Rollout, outputs: PolicyOutputs, plan: ShardPlan, config: Config
) -> None:
    """Adds PPO's generalised advantages, the critic's targets, and which samples count, to a batch."""
    assert outputs.values is not None
    device, shards = state.parameters.flat.device, plan.local_num_shards
    scaled = rollout.rewards if state.return_normalizer is None else state.return_normalizer(rollout.rewards)
    with np.errstate(over="ignore"):  # the loss made of them is looked at
        rewards, terminated = (to_device(x.astype(np.float32), device) for x in (scaled, rollout.terminated))
    done = to_device(rollout.done, device).float()
    values = from_shards(outputs.values.flatten(1), config.num_steps + 1)
    followed = bootstrap_values(state, rollout, outputs, plan)
    gamma, gae_lambda = config.ppo.gamma, config.ppo.gae_lambda
    advantages, returns = gae(rewards, values[:-1], followed, terminated, done, gamma, gae_lambda)
    batch.advantages, batch.returns = to_shards(advantages, shards), to_shards(returns, shards)
    batch.values = outputs.values[:, :-1].flatten(1)
    if rollout.dead is not None:
        batch.valid = to_shards(to_device(~rollout.dead, device).float(), shards)


def in_sequences(batch: Batch, outputs: PolicyOutputs, begins: Tensor, state: TrainState, config: Config) -> Batch:
    """Cuts a batch into sequences, and adds the recurrent state before each of them."""
    assert outputs.recurrent_states is not None
    assert state.recurrent_state is not None
    steps, length = config.num_steps, config.sequence_length
    k, _, rows, width = outputs.recurrent_states.shape
    first = torch.as_tensor(state.recurrent_state).to(batch.actions.device).view(k, 1, rows, width)
    carried = torch.cat([first, outputs.recurrent_states[:, length - 1 : steps - 1 : length]], 1)
    cut = {name: to_sequences(x.contiguous(), steps, length) for name, x in batch.columns().items()}
    resets = to_sequences(begins.contiguous(), steps, length)
    return Batch(**cut, recurrent_state=carried.flatten(1, 2), resets=resets)
