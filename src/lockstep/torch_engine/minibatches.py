"""Minibatches: which samples they take, how their advantages are normalised, and how they are cut from the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import KeyedDraws, ShardPlan, keyed_seed
from lockstep.torch_engine.advantages import counted_moments, merge_counts, summed_alone
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.nets.functions import DROPOUT_SEED
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.setup.accelerator import to_device
from lockstep.torch_engine.state import TrainState
from lockstep.training.limits import ADVANTAGE_EPSILON

FEW_SAMPLES = 1 << 16  # of a shard in all epochs: above it, one shard at a time takes less memory and hardly more time


@dataclass
class MinibatchStatistics:
    """Holds the statistics of every minibatch of every epoch, known before the update.

    Attributes:
        counts: valid samples of the global minibatch, at least 1: int64 array ``[num_epochs, num_minibatches]``, or a
            float64 tensor on an accelerator.
        mean: what to subtract from advantages, float32 ``[num_epochs, num_minibatches, 1 or k, 1]``; None: nothing.
        scale: what to divide them by after that, of the same shape.
    """

    counts: Any
    mean: Tensor | None = None
    scale: Tensor | None = None


def minibatch_indices(config: Config, plan: ShardPlan, iteration: int) -> np.ndarray:
    """Draws the indices of every minibatch, of samples or of sequences: ``[num_epochs, num_minibatches, k, rows]``.

    The permutations are keyed by ``(seed, "minibatch", iteration, epoch, shard)``. Global minibatch ``m`` is the union
    of every shard's slice ``m``, so no sample crosses the network.
    """
    samples, ppo = config.num_steps * plan.envs_per_shard // config.sequence_length, config.ppo
    out = np.empty((ppo.num_epochs, plan.local_num_shards, samples), np.int64)
    keyed = KeyedDraws()
    for epoch in range(ppo.num_epochs):
        for row, shard in enumerate(plan.shards):
            out[epoch, row] = keyed.generator(config.seed, "minibatch", iteration, epoch, shard).permutation(samples)
    return out.reshape(ppo.num_epochs, plan.local_num_shards, ppo.num_minibatches, -1).swapaxes(1, 2)


def advantage_moments(batch: Batch, indices: np.ndarray | Tensor) -> Tensor:
    """Computes count, mean and M2 of each minibatch's advantages: float64 ``[k, num_epochs, num_minibatches, 3]``.

    The indices are those of :func:`minibatch_indices`; they may be on an accelerator already.
    """
    device = batch.advantages.device
    if isinstance(indices, np.ndarray) and summed_alone(device) and indices[:, :, 0].size <= FEW_SAMPLES:
        shards, samples = batch.advantages.shape[:2]
        index = torch.from_numpy(indices.transpose(2, 0, 1, 3) + np.arange(shards)[:, None, None, None] * samples)
        valid = None if batch.valid is None else batch.valid.flatten(0, 1)[index].flatten(3)
        return counted_moments(batch.advantages.flatten(0, 1)[index].flatten(3), valid)
    per_shard = []
    for shard, advantages in enumerate(batch.advantages):
        own = indices[:, :, shard]
        index = to_device(np.ascontiguousarray(own), device) if isinstance(own, np.ndarray) else own.contiguous()
        valid = None if batch.valid is None else batch.valid[shard][index].flatten(2)
        per_shard.append(counted_moments(advantages[index].flatten(2), valid))
    return torch.stack(per_shard)


def minibatch_statistics(config: Config, local: Tensor, everyone: Tensor) -> MinibatchStatistics:
    """Computes counts, means and scales of the global minibatches.

    ``local`` are the :func:`advantage_moments` of the local shards, ``everyone`` those of all shards.
    """
    count, mean, std = merge_counts(everyone)
    counts = count.clamp(min=1.0)
    statistics = MinibatchStatistics(counts.numpy().astype(np.int64) if on_host(counts.device) else counts)
    if config.ppo.advantage_normalization == "off" or config.algorithm == "grpo":
        return statistics
    if config.ppo.advantage_normalization == "rank":
        _, mean, std = merge_counts(local)
    if config.ppo.advantage_normalization == "local":
        mean, std = local[..., 1], (local[..., 2] / local[..., 0].clamp(min=1.0)).sqrt()
        mean, std = (x.permute(1, 2, 0).unsqueeze(-1) for x in (mean, std))
    else:
        mean, std = (x[..., None, None] for x in (mean, std))
    statistics.mean, statistics.scale = mean.float(), (std + ADVANTAGE_EPSILON).float()
    return statistics


def normalize_advantages(advantages: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Normalises advantages ``[…, k, rows, …]`` by statistics ``[…, 1 or k, 1]`` of their minibatches."""
    mean, scale = (x.view(*x.shape, *(1,) * (advantages.dim() - x.dim())) for x in (mean, scale))
    return (advantages - mean) / scale


def dropout_seeds(config: Config, plan: ShardPlan, iteration: int, epoch: int, number: int) -> Tensor:
    """Returns the seeds of a minibatch's dropout, int64 ``[k, 1]`` on the host.

    They are keyed by ``(seed, "dropout", iteration, epoch, minibatch, shard)``.
    """
    keys = [keyed_seed(config.seed, "dropout", iteration, epoch, number, shard) for shard in plan.shards]
    return torch.tensor(keys).unsqueeze(1)


def observations_taker(observations: Tensor, of_shard: Tensor, of_all: Tensor) -> Callable[[int], Tensor]:
    """Returns a function that copies the observations ``[k, rows, …]`` of the minibatch with a given number.

    Takes observations ``[k, samples, …]`` and indices ``[num_minibatches, k, rows]``: ``of_shard`` within a shard,
    ``of_all`` into the samples of all shards one after another.
    """
    if observations.dtype != torch.uint8:
        flat = observations.reshape(-1, *observations.shape[2:])
        return lambda number: flat[of_all[number]]

    def take(number: int) -> Tensor:
        """Copies images shard by shard, so that nothing but the minibatch is copied."""
        out = observations.new_empty((*of_shard[number].shape, *observations.shape[2:]))
        for shard, samples in enumerate(observations):
            torch.index_select(samples, 0, of_shard[number, shard], out=out[shard])
        return out

    return take


def epoch_minibatches(
    state: TrainState,
    batch: Batch,
    indices: np.ndarray,
    statistics: MinibatchStatistics,
    epoch: int,
    config: Config,
    plan: ShardPlan,
) -> Iterator[dict[str, Tensor]]:
    """Yields the minibatches of one epoch, tensors ``[k, rows, …]`` by name.

    Each minibatch's observations are copied when it is needed, into memory of their own. The other columns are
    copied for the whole epoch at once. Of them only a recurrent policy's states go into a matrix product, whose bits
    don't depend on where its factors begin.
    """
    shards, samples = batch.advantages.shape[:2]
    offsets = np.arange(shards)[:, None] * samples
    index = torch.from_numpy(indices[epoch] + offsets).to(batch.advantages.device)
    given = batch.columns()
    observations = given.pop("observations")
    columns = {name: x.reshape(shards * samples, *x.shape[2:])[index] for name, x in given.items()}
    take = observations_taker(observations, torch.from_numpy(indices[epoch]).to(index.device), index)
    if statistics.mean is not None and statistics.scale is not None:
        columns["advantages"] = normalize_advantages(
            columns["advantages"], statistics.mean[epoch], statistics.scale[epoch]
        )
    for number in range(len(index)):
        minibatch = {name: x[number] for name, x in columns.items()}
        minibatch["observations"] = take(number)
        if state.net.custom is not None:
            minibatch[DROPOUT_SEED] = dropout_seeds(config, plan, state.iteration, epoch, number)
        yield minibatch
