"""Gradients of a minibatch: each shard's own, and how they are combined, exactly or fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.config.run import Config
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.losses import loss_and_terms
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.compiled import LossFunction, compiled
from lockstep.torch_engine.nets.nets import Parameters, PolicyNet
from lockstep.torch_engine.plain.policy import PlainPolicy
from lockstep.torch_engine.setup.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState, optimizer_options, release_parameters
from lockstep.training.losses import LossSettings, loss_settings

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.sharded import ShardedParameters

Columns = Mapping[str, Tensor]
"""A minibatch by name, tensors ``[k, rows, …]``; :class:`lockstep.torch_engine.batch.Batch` says what they are."""

GradientSource = Callable[[Columns, int], Tensor]
"""From a minibatch and its global count of valid samples to gradient and loss terms: ``[k, P + T]`` for each shard, or
``[P + T]`` combined."""

DROPOUT_SEED = "dropout_seed"


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
        net.custom.set_dropout(None if columns is None else int(columns[DROPOUT_SEED][0, 0]))


def shard_gradients(state: TrainState, settings: LossSettings, config: Config) -> GradientSource:
    """A function of a minibatch that returns each shard's gradient and loss terms, ``[k, P + T]``."""
    plain = state.plain
    part = autograd_gradients(state, settings, config) if plain is None else plain_gradients(plain, settings)
    pieces = config.ppo.gradient_accumulation
    if pieces == 1:
        return part

    def accumulated(columns: Columns, count: int) -> Tensor:
        # a part may use its result's memory again
        return distributions.sum_in_order([part(piece, count).clone() for piece in in_pieces(columns, pieces)])

    return accumulated


def in_pieces(columns: Columns, pieces: int) -> list[Columns]:
    """A minibatch cut into equal parts of every shard's samples; each part has a dropout of its own."""
    out: list[dict[str, Tensor]] = [{} for _ in range(pieces)]
    for name, x in columns.items():
        parts = [x + number for number in range(pieces)] if name == DROPOUT_SEED else x.chunk(pieces, 1)
        for piece, part in zip(out, parts, strict=True):
            piece[name] = part.contiguous()
    return list(out)


def plain_gradients(plain: PlainPolicy, settings: LossSettings) -> GradientSource:
    """By hand, in NumPy: for plain policies on a CPU."""

    def gradients(columns: Columns, count: int) -> Tensor:
        with_count = settings if count == settings.count else replace(settings, count=count)
        return torch.from_numpy(plain.gradients({name: x.numpy() for name, x in columns.items()}, with_count))

    return gradients


def autograd_gradients(state: TrainState, settings: LossSettings, config: Config) -> GradientSource:
    """By autograd: for networks without a derivation of their own."""
    views, net, loss_of = state.parameters.views, state.net, compiled(minibatch_loss, config)

    def gradients(columns: Columns, count: int) -> Tensor:
        shards = len(columns["actions"])
        weights = {name: w.requires_grad_() for name, w in nets.expand(views, shards).items()}
        _set_dropout(net, columns)
        with torch.enable_grad():
            loss, terms = loss_of(net, weights, columns, replace(settings, count=count))
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
    """The loss as a module, for DDP and FSDP: every gradient-producing pass goes through its ``forward``."""

    def __init__(self, net: PolicyNet, parameters: Parameters, loss_of: LossFunction = minibatch_loss) -> None:
        super().__init__()
        self.net, self._loss_of = net, loss_of
        self._names = {name: name.replace(".", "_") for name in parameters}
        for name, value in parameters.items():
            self.register_parameter(self._names[name], nn.Parameter(value))

    def forward(self, columns: Columns, settings: LossSettings) -> tuple[Tensor, Tensor]:
        """The loss ``[1]`` and its terms ``[1, T]`` of all samples as one shard."""
        weights = nets.expand({name: getattr(self, flat) for name, flat in self._names.items()}, 1)
        return self._loss_of(self.net, weights, columns, settings)


def as_one_shard(columns: Columns) -> dict[str, Tensor]:
    """All samples of the local shards as those of one."""
    return {name: x.flatten(0, 1).unsqueeze(0) for name, x in columns.items()}


def fast_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Gradients of all local samples at once, combined by an all-reduce; equal up to summation order."""
    if state.sharded is not None:
        return sharded_gradient(state, state.sharded, config)
    if state.plain is None:
        return data_parallel_gradient(state, config, communicator)
    gradients = shard_gradients(state, loss_settings(config), config)

    def reduced(columns: Columns, count: int) -> Tensor:
        return communicator.all_reduce(gradients(as_one_shard(columns), count)[0])

    return reduced


def local_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Gradients of all local samples at once, not combined: an estimate of the global gradient by this rank alone.

    The loss is divided by the rank's share of the global count, so that the mean over ranks is the global gradient.
    """
    gradients = shard_gradients(state, loss_settings(config), config)
    size, world_size = state.parameters.flat.numel(), communicator.topology.world_size

    def local(columns: Columns, count: int) -> Tensor:
        out = gradients(as_one_shard(columns), count)[0]
        out[:size] *= world_size
        return out

    return local


def data_parallel_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """What :func:`fast_gradient` returns, by autograd behind DDP: for networks without a derivation of their own."""
    settings, world_size = loss_settings(config), communicator.topology.world_size
    inner = PolicyModule(state.net, state.parameters.views, compiled(minibatch_loss, config))
    module = communicator.data_parallel(inner, find_unused_parameters=state.net.custom is not None)
    keep_local = getattr(module, "no_sync", contextlib.nullcontext)
    pieces = config.ppo.gradient_accumulation

    def reduced(columns: Columns, count: int) -> Tensor:
        inner.zero_grad(set_to_none=True)
        all_terms = []
        for number, piece in enumerate(in_pieces(as_one_shard(columns), pieces), 1):
            with contextlib.nullcontext() if number == pieces else keep_local():
                loss, terms = _forward(module, state.net, piece, replace(settings, count=count))
                (loss.sum() * world_size).backward()  # DDP averages over ranks; the loss is part of a global mean
            all_terms.append(terms[0])
        gradient = torch.cat([_gradient(p).flatten() for p in inner.parameters()])
        return torch.cat([gradient, communicator.all_reduce(distributions.sum_in_order(all_terms))])

    return reduced


def sharded_gradient(state: TrainState, sharded: ShardedParameters, config: Config) -> GradientSource:
    """What :func:`fast_gradient` returns with FSDP: this rank's part of the combined gradient, and the loss terms."""
    settings, pieces = loss_settings(config), config.ppo.gradient_accumulation

    def reduced(columns: Columns, count: int) -> Tensor:
        all_terms = []
        for number, piece in enumerate(in_pieces(as_one_shard(columns), pieces), 1):
            sharded.reduce_after(number == pieces)
            loss, terms = _forward(sharded.module, state.net, piece, replace(settings, count=count))
            loss.sum().backward()
            all_terms.append(terms[0])
        gradient = sharded.take_gradient()
        return torch.cat([gradient, sharded.combined(gradient, distributions.sum_in_order(all_terms))])

    return reduced


def shard_parameters(state: TrainState, config: Config, communicator: Communicator) -> None:
    """Turn a state's parameters and optimiser into this rank's slices of them (FSDP2).

    Raises:
        ValueError: a custom network has a parameter without axes; one line.
    """
    for name, shape in state.parameters.shapes.items():
        if not shape:
            raise ValueError(f"fsdp: parameter {name} has no axis to be sharded along; give it shape (1,)")
    module = PolicyModule(state.net, state.parameters.views, compiled(minibatch_loss, config))
    state.sharded = communicator.shard(module)
    state.optimizer = state.sharded.make_optimizer(optimizer_options(config))
    state.parameters.flat.grad = None
    release_parameters(state)
    if state.net.custom is not None:
        state.net.custom.forget_parameters()


def _forward(module: nn.Module, net: PolicyNet, columns: Columns, settings: LossSettings) -> tuple[Tensor, Tensor]:
    _set_dropout(net, columns)
    loss, terms = module(columns, settings)
    _set_dropout(net, None)
    return loss, terms


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
