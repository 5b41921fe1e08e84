"""Computes a policy's numbers with PyTorch: networks of every kind, gradients by autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_engine.losses import loss_and_terms
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.compiled import LossFunction, compiled
from lockstep.torch_engine.nets.functions import DROPOUT_SEED, Actor, Columns
from lockstep.torch_engine.nets.layers_of_shards import GradientPlaces
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.nets import Parameters, PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.nets.row_sums import sums_of_rows
from lockstep.torch_engine.nets.shards import Mode, aligned, by_shard, in_pairs, shards_within
from lockstep.training.losses import LossSettings

if TYPE_CHECKING:
    from lockstep.config.run import Config
    from lockstep.core.shards import ShardPlan

Function = TypeVar("Function", bound=Callable[..., Any])

IMAGES_AT_A_TIME = 256
"""Images of a rollout evaluated at a time: as floats, and between layers, they take four times the bytes and more."""


def minibatch_loss(
    net: PolicyNet, weights: Parameters, columns: Columns, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Computes the loss ``[k]`` and its terms ``[k, T]`` of a minibatch."""
    observations, actions = columns["observations"], columns["actions"]
    if net.core:  # sequences [k, n, L, …]; the networks run along the second axis
        along = (columns["recurrent_state"], columns["resets"].transpose(1, 2))
        output, values, _ = nets.unroll(net, weights, observations.transpose(1, 2).contiguous(), *along)
        output, values = output.transpose(1, 2), None if values is None else values.transpose(1, 2)
    else:
        output, values = nets.actor_critic(net, weights, observations)
    log_prob, entropy = distributions.log_prob_and_entropy(net, weights, output.float(), actions)

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float().flatten(1)

    return loss_and_terms(
        log_prob.flatten(1),
        entropy.flatten(1),
        flat(values),
        columns["log_probs"].flatten(1),
        flat(columns.get("values")),
        columns["advantages"].flatten(1),
        flat(columns.get("returns")),
        settings,
        flat(columns.get("valid")),
        flat(columns.get("reference_log_probs")),
        output.float().flatten(1, -2) if settings.loss is not None else None,
        sums_of_rows,
    )


def dropout(net: PolicyNet, columns: Columns) -> AbstractContextManager[None]:
    """Turns on a custom network's dropout, keyed by a minibatch's seed, for the pass of its loss."""
    if net.custom is None:
        return nullcontext()
    return net.custom.dropout(int(columns[DROPOUT_SEED][0, 0]), columns["actions"].device)


def lone_in_pairs(function: Function) -> Function:
    """Makes a method of shards ``[k, …]`` compute a single one as the first of two, if the policy's ``pairs`` is."""

    @functools.wraps(function)
    def called(self: AutogradFunctions, *arguments: Tensor) -> Any:
        if not self.pairs or len(arguments[0]) != 1:
            return function(self, *arguments)
        result = function(self, *map(in_pairs, arguments))
        return tuple(x[:1] for x in result) if isinstance(result, tuple) else result[:1]

    return called  # pyright: ignore[reportReturnType]


class AutogradFunctions:
    """Computes a policy's numbers with PyTorch; see :class:`lockstep.torch_engine.nets.functions.PolicyFunctions`.

    Attributes:
        pairs: whether a single shard is computed as one of two, because alone it would have other bits: PyTorch
            multiplies one matrix by another call of CUDA's library than a batch of two.
    """

    def __init__(self, net: PolicyNet, parameters: FlatParameters, config: Config) -> None:
        self.net, self.weights, self._config = net, parameters, config
        self.pairs = False

    def actor(self, plan: ShardPlan, mode: Mode) -> NetActor:
        """See :meth:`PolicyFunctions.actor`."""
        if self.net.core is not None:
            return RecurrentActor(self, plan, mode)
        return NetActor(self, plan, mode)

    @lone_in_pairs
    def output(self, observations: Tensor) -> Tensor:
        """See :meth:`PolicyFunctions.output`."""
        return nets.actor(self.net, self.weights.expanded(len(observations)), observations)

    @lone_in_pairs
    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`PolicyFunctions.evaluate`."""
        net, weights, count = self.net, self.weights.expanded(len(observations)), actions.shape[1]
        if net.convolutional and net.custom is None:
            output, values = self._of_images(observations)
        elif net.shared or net.custom is not None or not net.critic:
            output, values = nets.actor_critic(net, weights, observations)
        else:
            acted = observations[:, :count].clone()
            output, values = nets.actor(net, weights, acted), nets.critic(net, weights, observations)
        log_prob = distributions.log_prob_and_entropy(net, weights, output[:, :count], actions)[0]
        return log_prob, log_prob[:, :0] if values is None else values

    def _of_images(self, observations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes outputs and values of rows ``[k, m, width]``, in parts so that memory stays small and warm."""
        weights, size = self.weights.expanded(len(observations)), max(1, IMAGES_AT_A_TIME // len(observations))
        parts = [nets.actor_critic(self.net, weights, part) for part in observations.split(size, 1)]
        outputs, values = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(values, 1) if self.net.critic else None

    @lone_in_pairs
    def unroll(
        self, observations: Tensor, actions: Tensor, recurrent_state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`PolicyFunctions.unroll`."""
        weights = self.weights.expanded(len(observations))
        output, values, states = nets.unroll(self.net, weights, observations, recurrent_state, resets)
        log_prob = distributions.log_prob_and_entropy(self.net, weights, output[:, :-1], actions)[0]
        return log_prob, log_prob[:, :0] if values is None else values, states

    @lone_in_pairs
    def step(self, observations: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`PolicyFunctions.step`."""
        weights, none = self.weights.expanded(len(observations)), torch.zeros_like(recurrent_state[:, None, :, 0])
        output, _, states = nets.unroll(
            self.net, weights, observations.unsqueeze(1), recurrent_state, none, actor_only=True
        )
        return output[:, 0], states[:, 0]

    def values(self, observations: np.ndarray | Tensor, recurrent_state: Tensor | None) -> Tensor:
        """See :meth:`PolicyFunctions.values`."""
        weights = self.weights.expanded(1)
        rows = aligned(observations, self.weights.flat.device)
        if recurrent_state is None:
            return nets.critic(self.net, weights, rows)[0]
        none = torch.zeros((1, 1, rows.shape[1]), device=rows.device)
        values = nets.unroll(self.net, weights, rows.unsqueeze(1), recurrent_state, none)[1]
        assert values is not None
        return values[0, 0]

    @cached_property
    def _loss(self) -> LossFunction:
        return compiled(minibatch_loss, self._config)

    def gradients(self, columns: Columns, settings: LossSettings, out: Tensor | None = None) -> Tensor:
        """See :meth:`PolicyFunctions.gradients`."""
        shards = len(columns["actions"])
        if shards == 1 and (self.pairs or (self.net.custom is not None and self.net.custom.pairs)):
            pair = self.gradients({name: in_pairs(x) for name, x in columns.items()}, settings)[:1]
            return pair if out is None else out.copy_(pair)
        weights = {name: w.requires_grad_() for name, w in nets.expand(self.weights.views, shards).items()}
        places: dict[str, Tensor] = {}
        if out is not None and self.net.convolutional and on_host(out.device):
            places = self._places(out)
            weights = GradientPlaces(weights, places)
        with dropout(self.net, columns):
            with torch.enable_grad():
                loss, terms = self._loss(self.net, weights, columns, settings)
                total = loss.sum()
            parts = torch.autograd.grad(total, list(weights.values()), materialize_grads=True)
        if out is None or not places:
            return torch.cat([*(part.reshape(shards, -1).float() for part in parts), terms], 1, out=out)
        for place, part in zip(places.values(), parts, strict=True):
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)
        out[:, -terms.shape[1] :] = terms
        return out

    def _places(self, out: Tensor) -> dict[str, Tensor]:
        """Returns views of each parameter's part of gradients ``[k, P + T]``, by name, ``[k, …]``."""
        sizes = list(self.weights.sizes.values())
        parts = out[:, : sum(sizes)].split(sizes, 1)
        named = zip(self.weights.shapes.items(), parts, strict=True)
        return {name: part.view(len(out), *shape) for (name, shape), part in named}


class NetActor(Actor):
    """Samples actions from networks without a state; see :class:`lockstep.torch_engine.nets.functions.Actor`."""

    def __init__(self, policy: AutogradFunctions, plan: ShardPlan, mode: Mode) -> None:
        self._policy, self._net, self._parameters = policy, policy.net, policy.weights
        self._device = policy.weights.flat.device
        self._mode: Mode = mode
        self._shards, self._rows = plan.local_num_shards, plan.envs_per_shard

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`."""
        drawn = torch.from_numpy(noise).to(self._device)
        return self.tensors(torch.from_numpy(observations).to(self._device), drawn, part).cpu().numpy()

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`."""
        shards = len(observations) // self._rows
        x = aligned(observations, self._device).view(shards, self._rows, -1)
        return self._sampled(x, noise.view(shards, self._rows, -1), shards_within(part, self._rows)).flatten(0, 1)

    def _sampled(self, x: Tensor, noise: Tensor, shards: slice) -> Tensor:
        """Samples actions ``[k, rows, …]`` from observations and noise ``[k, rows, …]`` of some local shards."""
        return by_shard(self._mode, self._sample, x, noise)

    def _sample(self, x: Tensor, noise: Tensor) -> Tensor:
        return distributions.sample(self._net, self._parameters.expanded(len(x)), self._policy.output(x), noise)


class RecurrentActor(NetActor):
    """Samples actions from recurrent networks, and keeps their state ``[k, rows, size]`` from step to step."""

    def __init__(self, policy: AutogradFunctions, plan: ShardPlan, mode: Mode) -> None:
        super().__init__(policy, plan, mode)
        self._state = torch.zeros(0)

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """See :meth:`Actor.begin`."""
        assert recurrent_state is not None
        state = torch.as_tensor(recurrent_state).to(self._device).view(self._shards, self._rows, -1)
        self._state = self._state.copy_(state) if self._state.shape == state.shape else state.clone()

    def _sampled(self, x: Tensor, noise: Tensor, shards: slice) -> Tensor:
        actions, after = by_shard(self._mode, self._recurrent_sample, x, noise, self._state[shards].clone())
        self._state[shards] = after
        return actions

    def _recurrent_sample(self, x: Tensor, noise: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, after = self._policy.step(x, state)
        return distributions.sample(self._net, self._parameters.expanded(len(x)), output, noise), after

    def forget(self, done: Tensor, part: slice | None = None) -> None:
        """See :meth:`Actor.forget`."""
        state = self._state[shards_within(part, self._rows)]
        state.masked_fill_(done.to(self._device).view(len(state), self._rows, 1), 0.0)

    def carried(self) -> list[Tensor]:
        """See :meth:`Actor.carried`."""
        return [self._state]
