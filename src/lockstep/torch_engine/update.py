"""The PPO update: epochs of minibatches, one collective per optimiser step, every decision from combined values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.errors import NonFiniteError
from lockstep.shards import ShardPlan, keyed_generator
from lockstep.torch_engine import nets
from lockstep.torch_engine.advantages import merge_equal_counts, moments
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.derived import derivable, ppo_gradients
from lockstep.torch_engine.distributed import Communicator
from lockstep.torch_engine.losses import TERMS, LossSettings, ppo_terms
from lockstep.torch_engine.nets import PolicyModule
from lockstep.torch_engine.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState

ADVANTAGE_EPSILON = 1e-8
KL_STOP_FACTOR = 1.5
LEARNING_RATE_LIMITS = (1e-5, 1e-2)

# A gradient source takes a minibatch (observations, actions, log_probs, values, advantages, returns), each
# [k, rows, …], and returns the reduced gradient and loss terms of the global minibatch in one vector [P + 5].
GradientSource = Callable[..., Tensor]


def loss_settings(config: Config) -> LossSettings:
    """The loss's coefficients, with the global minibatch's count."""
    ppo = config.ppo
    count = config.steps_per_iteration // ppo.num_minibatches
    return LossSettings(ppo.clip_range, ppo.value_clip_range, ppo.entropy_coef, ppo.value_coef, count)


def shard_gradients(state: TrainState, settings: LossSettings) -> GradientSource:
    """A function of a minibatch ``[k, rows, …]`` that returns each shard's gradient and loss terms, ``[k, P + 5]``."""
    if not derivable(state.net):
        return autograd_gradients(state, settings)

    def gradients(*minibatch: Tensor) -> Tensor:
        return ppo_gradients(state.net, state.parameters.expanded(len(minibatch[0])), settings, *minibatch)

    return gradients


def autograd_gradients(state: TrainState, settings: LossSettings) -> GradientSource:
    """What :func:`shard_gradients` returns, by autograd: for networks without a derivation of their own."""
    views, net = state.parameters.views, state.net

    def gradients(
        observations: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, advantages: Tensor, returns: Tensor
    ) -> Tensor:
        shards = len(observations)
        weights = {name: w.requires_grad_() for name, w in nets.expand(views, shards).items()}
        with torch.enable_grad():
            output = nets.actor(net, weights, observations)
            log_prob, entropy = nets.log_prob_and_entropy(net, weights, output, actions)
            new_values = nets.critic(net, weights, observations)
            loss, terms = ppo_terms(log_prob, entropy, new_values, log_probs, values, advantages, returns, settings)
            parts = torch.autograd.grad(loss.sum(), list(weights.values()))
        return torch.cat([*(part.reshape(shards, -1) for part in parts), terms], 1)

    return gradients


def exact_gradient(state: TrainState, config: Config, communicator: Communicator, mode: Mode) -> GradientSource:
    """Gradients shard by shard, combined by a fixed tree: the same bits for every world size."""
    gradients = shard_gradients(state, loss_settings(config))

    def reduced(*minibatch: Tensor) -> Tensor:
        return communicator.sum_shards(by_shard(mode, gradients, *minibatch))

    return reduced


def fast_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """Gradients of all local samples at once, combined by an all-reduce; equal up to summation order."""
    if not derivable(state.net):
        return data_parallel_gradient(state, config, communicator)
    gradients = shard_gradients(state, loss_settings(config))

    def reduced(*minibatch: Tensor) -> Tensor:
        as_one_shard = (x.flatten(0, 1).unsqueeze(0) for x in minibatch)
        return communicator.all_reduce(gradients(*as_one_shard)[0])

    return reduced


def data_parallel_gradient(state: TrainState, config: Config, communicator: Communicator) -> GradientSource:
    """What :func:`fast_gradient` returns, by autograd behind DDP: for networks without a derivation of their own."""
    settings, world_size = loss_settings(config), communicator.topology.world_size
    inner = PolicyModule(state.net, state.parameters.views)
    module = communicator.data_parallel(inner)

    def reduced(observations: Tensor, actions: Tensor, *rest: Tensor) -> Tensor:
        inner.zero_grad(set_to_none=True)
        old_log_prob, old_values, advantages, returns = (x.flatten() for x in rest)
        log_prob, entropy, values = module(observations.flatten(0, 1), actions.flatten(0, 1))
        loss, terms = ppo_terms(log_prob, entropy, values, old_log_prob, old_values, advantages, returns, settings)
        (loss * world_size).backward()  # DDP averages over ranks; the loss is a part of a global mean already
        gradient = torch.cat([p.grad.flatten() for p in inner.parameters() if p.grad is not None])
        return torch.cat([gradient, communicator.all_reduce(terms)])

    return reduced


def minibatch_indices(config: Config, plan: ShardPlan, iteration: int) -> np.ndarray:
    """Sample indices of every minibatch, ``[num_epochs, num_minibatches, k, rows]``, each within its shard.

    The permutations are keyed by ``(seed, "minibatch", iteration, epoch, shard)``. Global minibatch ``m`` is the union
    of every shard's slice ``m``: no sample crosses the network.
    """
    samples, ppo = config.num_steps * plan.envs_per_shard, config.ppo
    out = np.empty((ppo.num_epochs, plan.local_num_shards, samples), np.int64)
    for epoch in range(ppo.num_epochs):
        for row, shard in enumerate(plan.shards):
            out[epoch, row] = keyed_generator(config.seed, "minibatch", iteration, epoch, shard).permutation(samples)
    return out.reshape(ppo.num_epochs, plan.local_num_shards, ppo.num_minibatches, -1).swapaxes(1, 2)


def advantage_moments(batch: Batch, indices: np.ndarray) -> Tensor:
    """Mean and M2 of every minibatch of every epoch by shard: float64 ``[k, num_epochs, num_minibatches, 2]``."""
    device = batch.advantages.device
    per_shard = [
        moments(advantages[torch.from_numpy(np.ascontiguousarray(indices[:, :, shard])).to(device)])
        for shard, advantages in enumerate(batch.advantages)
    ]
    return torch.stack(per_shard)


def advantage_scales(config: Config, local: Tensor, everyone: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
    """What to subtract from and divide advantages by, float32 ``[num_epochs, num_minibatches, 1 or k, 1]``.

    Args:
        config: says over what advantages are normalised.
        local: :func:`advantage_moments` of the local shards; ``everyone``: of all shards, gathered.
        everyone: see ``local``.
        rows: samples of a shard in a minibatch.
    """
    if config.ppo.advantage_normalization == "off":
        return None
    if config.ppo.advantage_normalization == "local":
        mean, std = local[..., 0], (local[..., 1] / rows).sqrt()
        mean, std = (x.permute(1, 2, 0).unsqueeze(-1) for x in (mean, std))
    else:
        mean, std = (x[..., None, None] for x in merge_equal_counts(everyone, rows))
    return mean.float(), (std + ADVANTAGE_EPSILON).float()


@dataclass
class UpdateResult:
    """What an update did, on every rank the same.

    Attributes:
        terms: sums of the loss terms over the minibatches that were evaluated, the one that stopped it included.
        evaluated: number of those minibatches.
        grad_norm: sum over optimiser steps; ``steps`` their number.
        stopped_by_kl: whether the KL stop ended it.
    """

    terms: np.ndarray
    evaluated: int = 0
    grad_norm: float = 0.0
    steps: int = 0
    stopped_by_kl: bool = False

    def metrics(self, config: Config, learning_rate: float) -> dict[str, float | int]:
        """Means over the minibatches."""
        steps = max(1, self.steps)
        means = dict(zip(TERMS, (self.terms / max(1, self.evaluated)).tolist(), strict=True))
        ppo = config.ppo
        total = means["policy_loss"] + ppo.value_coef * means["value_loss"] - ppo.entropy_coef * means["entropy"]
        out: dict[str, float | int] = {"train/loss": total}
        out |= {f"train/{name}": value for name, value in means.items()}
        out["train/grad_norm"] = self.grad_norm / steps
        out["train/learning_rate"] = learning_rate
        out["train/optimizer_steps"] = self.steps
        out["train/stopped_by_kl"] = int(self.stopped_by_kl)
        return out


def scheduled_learning_rate(state: TrainState, config: Config) -> float:
    """The learning rate of this iteration, from global steps done."""
    if config.ppo.schedule == "linear":
        return config.ppo.learning_rate * max(0.0, 1.0 - state.global_step / config.total_steps)
    return state.learning_rate


def adapted_learning_rate(learning_rate: float, kl: float, desired_kl: float) -> float:
    """Down by 1.5 above twice the desired KL, up by 1.5 below half of it (rsl_rl; Schwarke et al. 2025)."""
    low, high = LEARNING_RATE_LIMITS
    if kl > 2.0 * desired_kl:
        return max(low, learning_rate / 1.5)
    if 0.0 < kl < 0.5 * desired_kl:
        return min(high, learning_rate * 1.5)
    return learning_rate


def clip_and_step(state: TrainState, gradient: Tensor, max_norm: float | None, learning_rate: float) -> float:
    """Clip the reduced gradient by its global norm and apply it; returns the norm before clipping."""
    norm = torch.linalg.vector_norm(gradient)
    if max_norm is not None:
        gradient = gradient * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    flat = state.parameters.flat
    assert flat.grad is not None
    flat.grad.copy_(gradient)
    state.optimizer.param_groups[0]["lr"] = learning_rate
    state.optimizer.step()
    state.optimizer_steps += 1
    return float(norm)


def epoch_minibatches(
    batch: Batch, indices: np.ndarray, scales: tuple[Tensor, Tensor] | None
) -> list[tuple[Tensor, ...]]:
    """The minibatches of one epoch, tensors ``[k, rows, …]``; ``indices`` ``[num_minibatches, k, rows]``."""
    shards, samples = batch.advantages.shape
    offsets = np.arange(shards)[:, None] * samples
    index = torch.from_numpy(np.ascontiguousarray(indices + offsets)).to(batch.advantages.device)
    columns: list[Any] = [x.reshape(shards * samples, *x.shape[2:])[index] for x in batch.tensors()]
    if scales is not None:
        columns[4] = (columns[4] - scales[0]) / scales[1]
    columns[0] = [x.clone() for x in columns[0]]  # each in memory of its own: see rollout.aligned
    return list(zip(*columns, strict=True))


def update(
    state: TrainState,
    batch: Batch,
    indices: np.ndarray,
    scales: tuple[Tensor, Tensor] | None,
    config: Config,
    source: GradientSource,
) -> UpdateResult:
    """Train on one rollout.

    Args:
        state: changed in place.
        batch: samples of the local shards.
        indices: :func:`minibatch_indices`.
        scales: :func:`advantage_scales`.
        config: the run's.
        source: :func:`exact_gradient` or :func:`fast_gradient`.

    Raises:
        NonFiniteError: on every rank at the same step, before the optimiser has seen it.
    """
    ppo, size = config.ppo, state.parameters.flat.numel()
    state.learning_rate = scheduled_learning_rate(state, config)
    result = UpdateResult(terms=np.zeros(len(TERMS)))
    for epoch in range(ppo.num_epochs):
        epoch_scales = None if scales is None else (scales[0][epoch], scales[1][epoch])
        for number, minibatch in enumerate(epoch_minibatches(batch, indices[epoch], epoch_scales)):
            combined = source(*minibatch)
            terms = combined[size:].double().cpu().numpy()
            if not bool(torch.isfinite(combined).all()):
                named = ", ".join(f"{name} {value:.4g}" for name, value in zip(TERMS, terms, strict=True))
                raise NonFiniteError(
                    f"non-finite loss or gradient in iteration {state.iteration + 1}, epoch {epoch + 1}, minibatch "
                    f"{number + 1} ({named}); a smaller ppo.learning_rate or normalize.observations may help"
                )
            result.terms += terms
            result.evaluated += 1
            kl = float(terms[TERMS.index("approx_kl")])
            if ppo.target_kl is not None and kl > KL_STOP_FACTOR * ppo.target_kl:
                result.stopped_by_kl = True
                return result
            if ppo.schedule == "adaptive":
                state.learning_rate = adapted_learning_rate(state.learning_rate, kl, ppo.desired_kl)
            result.grad_norm += clip_and_step(state, combined[:size], ppo.max_grad_norm, state.learning_rate)
            result.steps += 1
    return result
