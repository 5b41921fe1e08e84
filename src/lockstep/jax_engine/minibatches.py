"""Minibatches: which samples they take, and how their advantages are normalised; :mod:`.update` cuts them out."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import counted_moments, merge_counts
from lockstep.jax_engine.shards.blocks import Blocks
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.shuffle import permutation
from lockstep.training.limits import ADVANTAGE_EPSILON


class MinibatchStatistics(NamedTuple):
    """Holds the statistics of every minibatch of every epoch, known before the update.

    Attributes:
        counts: valid samples of the global minibatch, at least 1: float32 ``[num_epochs, num_minibatches]``.
        mean: what to subtract from advantages, float32 ``[num_epochs, num_minibatches]``, with ``local`` normalisation
            ``[num_epochs, num_minibatches, blocks, 1 or units]``; None: nothing.
        scale: what to divide them by after that, of the same shape.
    """

    counts: Array
    mean: Array | None = None
    scale: Array | None = None


def minibatch_indices(config: Config, key: Array, iteration: Array, shard: Array) -> Array:
    """Draws the indices of a shard's units in every minibatch: int32 ``[num_epochs, num_minibatches, n]``.

    The permutations are keyed by ``(seed, "minibatch", iteration, shard, epoch)``. Global minibatch ``m`` is the union
    of every shard's slice ``m``, so no sample crosses the network. Units that don't fill all minibatches evenly are
    left out (``ppo.drop_remainder``).
    """
    ppo = config.ppo
    units = config.num_steps * (config.envs // config.shards) // config.sequence_length
    epochs = jnp.arange(ppo.num_epochs, dtype=jnp.uint32)
    whole = jax.vmap(lambda epoch: permutation(keyed(key, iteration, shard, epoch), units))(epochs)
    used = units - units % ppo.num_minibatches
    kept = whole if used == units else whole[:, :used]
    return kept.reshape(ppo.num_epochs, ppo.num_minibatches, -1)


def advantage_moments(advantages: Array, valid: Array | None, indices: Array) -> Array:
    """Computes count, mean, M2 of a block's part of every minibatch: float64 ``[num_epochs, num_minibatches, 3]``."""
    shape = (*indices.shape[:2], -1)
    chosen = None if valid is None else valid[indices].reshape(shape)
    return counted_moments(advantages[indices].reshape(shape), chosen)


def minibatch_statistics(config: Config, local: Array, everyone: Array, blocks: Blocks) -> MinibatchStatistics:
    """Computes counts, means and scales of the global minibatches.

    ``local`` are the :func:`advantage_moments` of the local shards ``[shards, num_epochs, num_minibatches, 3]``,
    ``everyone`` those of all shards.
    """
    with jax.enable_x64(True):
        count, mean, std = merge_counts(everyone)
        counts = jnp.maximum(count, 1.0).astype(jnp.float32)
        if config.ppo.advantage_normalization == "off" or config.algorithm == "grpo":
            return MinibatchStatistics(counts)
        if config.ppo.advantage_normalization == "rank":
            _, mean, std = merge_counts(local)
        if config.ppo.advantage_normalization == "local":
            mean, std = local[..., 1], jnp.sqrt(local[..., 2] / jnp.maximum(local[..., 0], 1.0))
        scale = (std + ADVANTAGE_EPSILON).astype(jnp.float32)
        mean = mean.astype(jnp.float32)
    if config.ppo.advantage_normalization == "local":
        units = config.num_steps * blocks.rows // config.sequence_length // config.ppo.num_minibatches
        mean, scale = (jnp.moveaxis(blocks.spread(x, units), 0, -2) for x in (mean, scale))
    return MinibatchStatistics(counts, mean, scale)
