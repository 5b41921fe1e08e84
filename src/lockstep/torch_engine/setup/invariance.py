"""The self-check at the start: trials of this run's functions, at its shapes, on keyed random data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.envs.gymnasium.random_policy import draw_actions, random_actions
from lockstep.torch_engine.nets.encoders import float_columns
from lockstep.torch_engine.nets.functions import DROPOUT_SEED, ShardGradients, shard_gradients
from lockstep.torch_engine.nets.shards import ShardFunction, to_shards
from lockstep.torch_engine.setup.self_check import shard_invariant
from lockstep.training.losses import loss_settings

if TYPE_CHECKING:
    from lockstep.torch_engine.state import TrainState

SELF_CHECK_DRAWS = 3
MOST_DRAWS = 8
"""The most draws for gradients of images."""
IMAGES_DRAWN = 256
"""The images of all draws of gradients for one number of shards, unless :data:`MOST_DRAWS` have fewer."""


def shards_invariant_here(state: TrainState, config: Config) -> bool:
    """Compares this run's action, evaluation and gradient, at its shapes on keyed random data, alone and batched."""
    plan = ShardPlan(config.envs, config.shards)
    if plan.num_shards == 1:
        return True
    return all(_shards_invariant(state, config, plan, draw) for draw in range(SELF_CHECK_DRAWS))


@torch.no_grad()
def rollouts_invariant_here(state: TrainState, config: Config) -> bool:
    """Compares one step of this run's actor, at its shapes on keyed random data, alone and batched."""
    plan = ShardPlan(config.envs, config.shards)
    draws = [_Draws(state, config, plan.num_shards, number) for number in range(SELF_CHECK_DRAWS)]
    return plan.num_shards == 1 or all(_steps_invariant(state, plan, draw) for draw in draws)


def gradients_invariant_here(state: TrainState, config: Config, together: int) -> bool:
    """Compares gradients of as many shards as calls take with one's, at the run's shapes on keyed random data."""
    return all(
        _gradients_invariant(state, config, 1 << power, number)
        for power in range(1, together.bit_length())
        for number in range(draws_of(samples_of_minibatch(config) << power))
    )


def draws_of(images: int) -> int:
    """Returns the number of draws for so many images: with few images, one draw shows less."""
    return max(1, min(MOST_DRAWS, IMAGES_DRAWN // images))


def _gradients_invariant(state: TrainState, config: Config, shards: int, number: int) -> bool:
    """Compares one draw of gradients of ``shards`` shards at once."""
    draws, count = _Draws(state, config, shards, shards * MOST_DRAWS + number), samples_of_minibatch(config)
    observations, actions = draws.observations(count), draws.actions(count)
    gradients, columns, size = _gradient_of_minibatch(state, config, draws, observations, actions)

    def in_place(part: dict[str, Tensor]) -> Tensor:
        return gradients(part, 1, state.parameters.flat.new_empty((len(part["actions"]), size)))

    return invariant(in_place, shards, columns, sizes=[shards])


def invariant(function: ShardFunction, num_shards: int, *arguments: Any, **more: Sequence[int]) -> bool:
    """Calls :func:`shard_invariant`, and counts each call as progress, because it may take long and ranks wait."""
    counted = functools.wraps(function)(lambda *parts: (life.progressed(), function(*parts))[1])
    return shard_invariant(counted, num_shards, *arguments, **more)


class _Draws:
    """Draws keyed random data in this run's shapes."""

    def __init__(self, state: TrainState, config: Config, shards: int, number: int) -> None:
        self._generator = keyed_generator(config.seed, "self-check", number)
        self._shards, self._layout, self._action = shards, state.net.observation, state.net.action
        self._device = state.parameters.flat.device

    def normal(self, *shape: int) -> Tensor:
        """Draws standard normal numbers ``[num_shards, …]``."""
        drawn = self._generator.standard_normal((self._shards, *shape)).astype("float32")
        return torch.from_numpy(drawn).to(self._device)

    def actions(self, count: int) -> Tensor:
        """Draws actions ``[num_shards, count, …]``."""
        drawn = draw_actions(self._generator, self._action, (self._shards, count))
        return torch.from_numpy(drawn).to(self._device)

    def observations(self, count: int) -> Tensor:
        """Draws rows ``[num_shards, count, width]``; indices are drawn within their choices, all bytes are pixels."""
        layout = self._layout
        floats = self.normal(count, layout.float_size)
        for leaf in layout.leaves:
            for n, choices in enumerate(leaf.choices):
                floats[..., leaf.start + n] = (floats[..., leaf.start + n].abs() * choices).floor() % choices
        if not layout.image_bytes:
            return floats
        shape = (self._shards, count, layout.width)
        rows = torch.from_numpy(self._generator.integers(0, 256, shape, "uint8")).to(self._device)
        float_columns(layout, rows)[...] = floats
        return rows


def _shards_invariant(state: TrainState, config: Config, plan: ShardPlan, number: int) -> bool:
    """Compares one draw: raw outputs, because actions would hide their last bits."""
    net, draws = state.net, _Draws(state, config, plan.num_shards, number)
    rows, steps = plan.envs_per_shard, config.num_steps
    observations = draws.observations((steps + 1) * rows)
    random = torch.from_numpy(random_actions(config, plan, net.action)).to(observations.device)
    actions = to_shards(random, plan.num_shards)
    with torch.no_grad():
        if net.core is None:
            first = observations[:, :rows].contiguous()
            passed = all(invariant(state.policy.output, plan.num_shards, seen) for seen in (first, observations))
            passed = passed and invariant(state.policy.evaluate, plan.num_shards, observations, actions)
        else:
            sequence = (observations.unflatten(1, (steps + 1, rows)), actions.unflatten(1, (steps, rows)))
            carried, resets = draws.normal(rows, net.state_size), (draws.normal(steps + 1, rows) > 1.5).float()
            passed = invariant(state.policy.unroll, plan.num_shards, *sequence, carried, resets) and invariant(
                state.policy.step, plan.num_shards, sequence[0][:, 0].contiguous(), carried
            )
        if not passed:
            return False
        gradients, columns, _ = _gradient_of_minibatch(state, config, draws, observations, actions)
        return invariant(lambda part: gradients(part, 1), plan.num_shards, columns)


def _steps_invariant(state: TrainState, plan: ShardPlan, draws: _Draws) -> bool:
    """Compares one step of the actor: its output, and the state after it."""
    net, rows = state.net, plan.envs_per_shard
    observations = draws.observations(rows)
    if net.core is None:
        return invariant(state.policy.output, plan.num_shards, observations)
    return invariant(state.policy.step, plan.num_shards, observations, draws.normal(rows, net.state_size))


def _gradient_of_minibatch(
    state: TrainState, config: Config, draws: _Draws, observations: Tensor, actions: Tensor
) -> tuple[ShardGradients, dict[str, Tensor], int]:
    """Returns a function that computes gradients, a minibatch of random data (its count is 1), and the width of rows.

    Takes observations ``[k, n, width]`` and actions ``[k, n, …]`` of at least as many samples as a minibatch has.
    """
    net, length, shards = state.net, config.sequence_length, len(observations)
    count = samples_of_minibatch(config) // length
    shape = (count, length) if net.core else (count,)

    def first(x: Tensor) -> Tensor:
        return x[:, : count * length].reshape(shards, *shape, *x.shape[2:]).contiguous()

    columns = {"observations": first(observations), "actions": first(actions)}
    names = ["log_probs", "advantages", *(("values", "returns") if net.critic else ())]
    columns |= {name: draws.normal(*shape) for name in names}
    if not net.critic or config.env.backend == "envpool":
        columns["valid"] = (draws.normal(*shape) > -1.0).float()
    if state.reference is not None:
        columns["reference_log_probs"] = draws.normal(*shape)
    if net.custom is not None:
        columns[DROPOUT_SEED] = torch.zeros((shards, 1), dtype=torch.int64)
    if net.core:
        columns["recurrent_state"] = draws.normal(count, net.state_size)
        columns["resets"] = (draws.normal(*shape) > 1.5).float()
    # A user's own loss is called for each shard alone anyway, so only the networks are checked here.
    settings = replace(loss_settings(config).scheduled(state.coefficients), loss=None)
    gradients = shard_gradients(state.policy, settings, config.ppo.gradient_accumulation)
    return gradients, columns, state.parameters.flat.numel() + len(settings.terms)


def samples_of_minibatch(config: Config) -> int:
    """Counts the samples of a shard in a minibatch."""
    return config.num_steps * ShardPlan(config.envs, config.shards).envs_per_shard // config.ppo.num_minibatches
