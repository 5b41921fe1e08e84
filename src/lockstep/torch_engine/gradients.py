"""Computes the gradients of a minibatch and reduces them over shards and ranks: exactly, fast, or not at each step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import AutogradFunctions, dropout, minibatch_loss
from lockstep.torch_engine.nets.compiled import LossFunction, compiled
from lockstep.torch_engine.nets.functions import DROPOUT_SEED, Columns, ShardGradients, in_pieces, shard_gradients
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.nets import Parameters, PolicyNet
from lockstep.torch_engine.nets.shards import Mode, independently, one_by_one, part_of, parts_of
from lockstep.torch_engine.state import TrainState, optimizer_options
from lockstep.training.losses import LossSettings, loss_settings

if TYPE_CHECKING:
    from lockstep.config.run import Config
    from lockstep.torch_engine.distributed.communicator import Communicator


class Gradient(NamedTuple):
    """Holds a minibatch's reduced gradient.

    Attributes:
        vector: ``[P]``, or with FSDP this rank's part of it.
        terms: the loss terms ``[T]``.
        norm: the global norm of the whole gradient, not finite if the gradient isn't; on an accelerator a scalar there.
    """

    vector: Tensor
    terms: Tensor
    norm: float | Tensor


GradientSource = Callable[[Columns, Any], Gradient]
"""Computes the gradient for the optimiser, from a minibatch and its global count of valid samples (an int or, on an
accelerator, a scalar there)."""


def choose_source(
    state: TrainState, config: Config, communicator: Communicator, mode: Mode, together: int, beside: bool = False
) -> GradientSource:
    """Chooses how gradients are reduced; with FSDP this turns the state's parameters and optimiser into slices."""
    if config.reduction == "exact":
        return exact_gradient(state, config, communicator, mode, together, beside)
    if config.sync_period > 1:
        return local_gradient(state, config, communicator)
    if config.fsdp and not communicator.alone:
        return sharded_gradient(state, config, communicator)
    return fast_gradient(state, config, communicator)


def norm_of(gradient: Tensor) -> float | Tensor:
    """Computes the norm of a gradient ``[P]``; it is not finite if the gradient isn't.

    An accelerator's is a scalar that stays there.
    """
    if on_host(gradient.device):
        host = gradient.numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the norm looks at it
            return math.sqrt(float(np.dot(host, host)))
    return torch.linalg.vector_norm(gradient)


def split(row: Tensor, settings: LossSettings) -> Gradient:
    """Splits the vector ``[P + T]`` of one collective into gradient and loss terms; computes the gradient's norm."""
    size = len(row) - len(settings.terms)
    return Gradient(row[:size], row[size:], norm_of(row[:size]))


def exact_gradient(
    state: TrainState,
    config: Config,
    communicator: Communicator,
    mode: Mode,
    together: int = 1,
    beside: bool = False,
) -> GradientSource:
    """Returns a source that computes gradients shard by shard and sums them by a fixed tree.

    The bits are the same for every world size. In a loop over shards, ``together`` is the most shards that one call
    takes, a power of two. ``beside`` says whether the calls may be branches of a graph, each of which holds what its
    loss keeps.
    """
    settings = loss_settings(config).scheduled(state.coefficients)
    gradients = shard_gradients(state.policy, settings, config.ppo.gradient_accumulation)
    rows: Tensor | None = None  # reused by all steps: new memory costs as much as a pass over it

    def reduced(columns: Columns, count: Any) -> Gradient:
        nonlocal rows
        if mode == "batched":
            return split(communicator.sum_shards(gradients(columns, count)), settings)
        shards, size = len(columns["actions"]), state.parameters.flat.numel() + len(settings.terms)
        rows = state.parameters.flat.new_empty((shards, size)) if rows is None else rows
        put = partial(_put, gradients, dict(columns), count, rows)
        (independently.get() if beside else one_by_one)([partial(put, *part) for part in parts_of(shards, together)])
        return split(communicator.sum_shards(rows), settings)

    return reduced


def _put(
    gradients: ShardGradients, columns: dict[str, Tensor], count: Any, rows: Tensor, first: int, last: int
) -> None:
    """Computes the gradients of the shards from ``first`` up to ``last`` into their rows of ``[k, P + T]``."""
    gradients(part_of(columns, first, last), count, rows[first:last])


def as_one_shard(columns: Columns) -> dict[str, Tensor]:
    """Joins the samples of all local shards as if of one shard, ``[1, k·rows, …]``."""
    return {name: x.flatten(0, 1).unsqueeze(0) for name, x in columns.items()}


def fast_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Returns a source that computes the gradient of all local samples at once and sums it over ranks by an all-reduce.

    The result equals the exact gradient up to summation order. DDP reduces the gradients if autograd computes them and
    they can travel while others are computed: on a CPU, or between accelerators by their own backend.
    """
    device = state.parameters.flat.device
    travels = on_host(device) or (communicator.own_backend is not None and not communicator.alone)
    if isinstance(state.policy, AutogradFunctions) and travels:
        return data_parallel_gradient(state, config, communicator)
    settings = loss_settings(config).scheduled(state.coefficients)
    gradients = shard_gradients(state.policy, settings, config.ppo.gradient_accumulation)

    def reduced(columns: Columns, count: Any) -> Gradient:
        return split(communicator.all_reduce(gradients(as_one_shard(columns), count)[0]), settings)

    return reduced


def local_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Returns a source that computes the gradient of all local samples at once, and doesn't reduce it.

    It is this rank's own estimate of the global gradient: the loss is divided by an equal share of the global count, so
    that the mean over ranks is the global gradient. A rank that owns more shards than others takes longer steps.
    """
    settings = loss_settings(config).scheduled(state.coefficients)
    gradients = shard_gradients(state.policy, settings, config.ppo.gradient_accumulation)
    size, world_size = state.parameters.flat.numel(), communicator.topology.world_size

    def local(columns: Columns, count: Any) -> Gradient:
        out = gradients(as_one_shard(columns), count)[0]
        out[:size] *= world_size
        return split(out, settings)

    return local


class LossModule(nn.Module):
    """Wraps the loss as a module for DDP and FSDP: every pass that produces gradients goes through ``forward``.

    The parameters become the module's own, on the same memory.
    """

    def __init__(self, net: PolicyNet, parameters: Parameters, loss_of: LossFunction) -> None:
        super().__init__()
        self.net, self._loss_of = net, loss_of
        # a custom network's names may not be valid here
        self._names = {name: f"p{number}" for number, name in enumerate(parameters)}
        for name, value in parameters.items():
            self.register_parameter(self._names[name], nn.Parameter(value))

    def forward(self, columns: Columns, settings: LossSettings) -> tuple[Tensor, Tensor]:
        """Computes the loss ``[1]`` and its terms ``[1, T]`` of all samples as one shard."""
        weights = nets.expand({name: getattr(self, flat) for name, flat in self._names.items()}, 1)
        return self._loss_of(self.net, weights, columns, settings)


def data_parallel_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Returns a source that does what :func:`fast_gradient` does, by autograd behind DDP."""
    settings, world_size = loss_settings(config).scheduled(state.coefficients), communicator.topology.world_size
    inner = LossModule(state.net, state.parameters.views, compiled(minibatch_loss, config))
    module = communicator.data_parallel(inner, find_unused_parameters=state.net.custom is not None)
    keep_local = getattr(module, "no_sync", contextlib.nullcontext)
    pieces = config.ppo.gradient_accumulation

    def taken(columns: Columns, count: Any) -> Gradient:
        inner.zero_grad(set_to_none=True)
        all_terms = []
        for number, piece in enumerate(in_pieces(as_one_shard(columns), pieces), 1):
            with torch.enable_grad(), contextlib.nullcontext() if number == pieces else keep_local():
                loss, terms = _forward(module, state.net, piece, settings.counting(count))
                (loss.sum() * world_size).backward()  # DDP averages over ranks, but the loss is part of a global mean
            all_terms.append(terms[0])
        gradient = torch.cat([_gradient(p).flatten() for p in inner.parameters()])
        terms = communicator.all_reduce(distributions.sum_in_order(all_terms))
        return Gradient(gradient, terms, norm_of(gradient))

    in_memory = communicator.slots is not None and communicator.own_backend is None  # by a tree, whatever the buckets
    laid_out = world_size < 3 or in_memory or state.net.custom is not None  # unused parameters keep DDP from reordering

    def reduced(columns: Columns, count: Any) -> Gradient:
        """Computes the gradient; the first time in a process twice, so that a resumed run adds in the same order.

        DDP reorders its buckets after its first backward pass, and a number's place in its bucket decides in which
        order a backend adds those of three or more ranks.
        """
        nonlocal laid_out
        if not laid_out:
            taken(columns, count)
            laid_out = True
        return taken(columns, count)

    return reduced


def sharded_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Returns a source that does what :func:`fast_gradient` does with FSDP2; a rank gets its part of the gradient.

    The state's parameters and optimiser become this rank's slices of them.

    Raises:
        ValueError: if a custom network has a parameter without axes; the message is one line.
    """
    for name, shape in state.parameters.shapes.items():
        if not shape:
            raise ValueError(f"fsdp: parameter {name} has no axis to be sharded along; give it shape (1,)")
    module = LossModule(state.net, state.parameters.views, compiled(minibatch_loss, config))
    sharded, state.optimizer = communicator.shard(module, state.parameters, optimizer_options(config))
    if state.net.custom is not None:
        state.net.custom.forget_parameters()
    settings, pieces = loss_settings(config).scheduled(state.coefficients), config.ppo.gradient_accumulation

    def reduced(columns: Columns, count: Any) -> Gradient:
        all_terms = []
        for number, piece in enumerate(in_pieces(as_one_shard(columns), pieces), 1):
            sharded.reduce_after(number == pieces)
            loss, terms = _forward(sharded.module, state.net, piece, settings.counting(count))
            loss.sum().backward()
            all_terms.append(terms[0])
        gradient = sharded.take_gradient()
        return Gradient(gradient, *sharded.combined(gradient, distributions.sum_in_order(all_terms)))

    return reduced


def _forward(module: nn.Module, net: PolicyNet, columns: Columns, settings: LossSettings) -> tuple[Tensor, Tensor]:
    with dropout(net, columns):  # the seed isn't passed: DDP and FSDP copy arguments to the device
        return module({name: x for name, x in columns.items() if name != DROPOUT_SEED}, settings)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
