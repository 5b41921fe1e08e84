"""Gradients of a minibatch: each shard's own, and how they are combined, exactly or fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.torch_engine import distributions, nets
from lockstep.torch_engine.distributed import Communicator
from lockstep.torch_engine.losses import LossSettings, loss_and_terms
from lockstep.torch_engine.nets import Parameters, PolicyNet
from lockstep.torch_engine.plain import PlainPolicy
from lockstep.torch_engine.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState

Columns = Mapping[str, Tensor]
"""A minibatch by name, tensors ``[k, rows, …]``; :class:`lockstep.torch_engine.batch.Batch` says what they are."""

GradientSource = Callable[[Columns, int], Tensor]
"""From a minibatch and its global count of valid samples to gradient and loss terms: ``[k, P + T]`` for each shard, or
``[P + T]`` combined."""

DROPOUT_SEED = "dropout_seed"


def loss_settings(config: Config) -> LossSettings:
    """The loss's coefficients, with the count of a global minibatch whose samples are all valid."""
    ppo = config.ppo
    count = config.steps_per_iteration // ppo.num_minibatches
    kl_coef = config.grpo.kl_coef if config.algorithm == "grpo" else 0.0
    return LossSettings(ppo.clip_range, ppo.value_clip_range, ppo.entropy_coef, ppo.value_coef, count, kl_coef)


def minibatch_loss(
    net: PolicyNet, weights: Parameters, columns: Columns, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """The loss ``[k]`` and its terms ``[k, T]`` of a minibatch."""
    observations, actions = columns["observations"], columns["actions"]
    if net.core:  # sequences [k, n, L, …]; the networks run along the second axis
        along = (columns["carry"], columns["resets"].transpose(1, 2))
        output, values, _ = nets.unroll(net, weights, observations.transpose(1, 2).contiguous(), *along)
        output, values = output.transpose(1, 2), None if values is None else values.transpose(1, 2)
    else:
        output, values = nets.actor_critic(net, weights, observations)
    log_prob, entropy = distributions.log_prob_and_entropy(net, weights, output.float(), actions)

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float().flatten(1)

    old_values, returns, valid, reference = (
        flat(columns.get(name)) for name in ("values", "returns", "valid", "reference_log_probs")
    )
    return loss_and_terms(
        log_prob.flatten(1),
        entropy.flatten(1),
        flat(values),
        columns["log_probs"].flatten(1),
        old_values,
        columns["advantages"].flatten(1),
        returns,
        settings,
        valid,
        reference,
    )


def _set_dropout(net: PolicyNet, columns: Columns | None) -> None:
    """Key the dropout of a custom network; without columns it is off."""
    if net.custom is not None:
        seed = None if columns is None else int(columns[DROPOUT_SEED][0, 0])
        net.custom.dropout_seed = seed


def shard_gradients(state: TrainState, settings: LossSettings, config: Config) -> GradientSource:
    """A function of a minibatch that returns each shard's gradient and loss terms, ``[k, P + T]``."""
    plain = state.plain
    part = autograd_gradients(state, settings, config) if plain is None else plain_gradients(plain, settings)
    pieces = config.ppo.gradient_accumulation
    if pieces == 1:
        return part

    def accumulated(columns: Columns, count: int) -> Tensor:
        split = [dict(zip(columns, x, strict=True)) for x in _pieces(columns, pieces)]
        return distributions.sum_in_order([part(piece, count).clone() for piece in split])  # one buffer

    return accumulated


def _pieces(columns: Columns, pieces: int) -> list[tuple[Tensor, ...]]:
    cut = [x.chunk(pieces, 1) if x.shape[1] > 1 else (x,) * pieces for x in columns.values()]
    return [tuple(part.contiguous() for part in parts) for parts in zip(*cut, strict=True)]


def plain_gradients(plain: PlainPolicy, settings: LossSettings) -> GradientSource:
    """By hand, in NumPy: for plain policies on a CPU."""

    def gradients(columns: Columns, count: int) -> Tensor:
        with_count = settings if count == settings.count else replace(settings, count=count)
        return torch.from_numpy(plain.gradients({name: x.numpy() for name, x in columns.items()}, with_count))

    return gradients


def autograd_gradients(state: TrainState, settings: LossSettings, config: Config) -> GradientSource:
    """By autograd: for networks without a derivation of their own."""
    views, net = state.parameters.views, state.net
    device = state.parameters.flat.device.type

    def gradients(columns: Columns, count: int) -> Tensor:
        shards = len(columns["actions"])
        weights = {name: w.requires_grad_() for name, w in nets.expand(views, shards).items()}
        _set_dropout(net, columns)
        with torch.enable_grad(), torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            loss, terms = minibatch_loss(net, weights, columns, replace(settings, count=count))
            total = loss.sum()
        parts = torch.autograd.grad(total, list(weights.values()), materialize_grads=True)
        _set_dropout(net, None)
        return torch.cat([*(part.reshape(shards, -1).float() for part in parts), terms], 1)

    return gradients


def exact_gradient(state: TrainState, config: Config, communicator: Communicator, mode: Mode) -> GradientSource:
    """Gradients shard by shard, combined by a fixed tree: the same bits for every world size."""
    gradients = shard_gradients(state, loss_settings(config), config)

    def reduced(columns: Columns, count: int) -> Tensor:
        each = by_shard(mode, lambda part: gradients(part, count), dict(columns))
        return communicator.sum_shards(each)

    return reduced


class PolicyModule(nn.Module):
    """The loss as a module, for DDP: every gradient-producing pass goes through its ``forward``."""

    def __init__(self, net: PolicyNet, parameters: Parameters) -> None:
        super().__init__()
        self.net = net
        self._names = {name: name.replace(".", "_") for name in parameters}
        for name, value in parameters.items():
            self.register_parameter(self._names[name], nn.Parameter(value))

    def forward(self, columns: Columns, settings: LossSettings) -> tuple[Tensor, Tensor]:
        """The loss ``[1]`` and its terms ``[1, T]`` of all samples as one shard."""
        weights = nets.expand({name: getattr(self, flat) for name, flat in self._names.items()}, 1)
        return minibatch_loss(self.net, weights, columns, settings)


def as_one_shard(columns: Columns) -> dict[str, Tensor]:
    """All samples of the local shards as those of one."""
    return {name: x.flatten(0, 1).unsqueeze(0) for name, x in columns.items()}


def fast_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Gradients of all local samples at once, combined by an all-reduce; equal up to summation order."""
    if state.plain is None:
        return data_parallel_gradient(state, config, communicator)
    gradients = shard_gradients(state, loss_settings(config), config)

    def reduced(columns: Columns, count: int) -> Tensor:
        return communicator.all_reduce(gradients(as_one_shard(columns), count)[0])

    return reduced


def data_parallel_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """What :func:`fast_gradient` returns, by autograd behind DDP: for networks without a derivation of their own."""
    settings, world_size = loss_settings(config), communicator.topology.world_size
    inner = PolicyModule(state.net, state.parameters.views)
    module = communicator.data_parallel(inner)
    device = state.parameters.flat.device.type

    def reduced(columns: Columns, count: int) -> Tensor:
        inner.zero_grad(set_to_none=True)
        joined = as_one_shard(columns)
        _set_dropout(state.net, joined)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            loss, terms = module(joined, replace(settings, count=count))
        (loss.sum() * world_size).backward()  # DDP averages over ranks; the loss is part of a global mean already
        _set_dropout(state.net, None)
        gradient = torch.cat([_gradient(p).flatten() for p in inner.parameters()])
        return torch.cat([gradient, communicator.all_reduce(terms[0])])

    return reduced


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
