"""Generalised advantage estimation and the moments of advantages; references in :mod:`lockstep.reference`."""

from __future__ import annotations

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.training.limits import GROUP_EPSILON, GROUP_ROUNDING

UNROLLED_SHARDS = 64
"""Moments of more shards than this are merged in a loop, because unrolled merges of hundreds compile slowly."""


def gae(
    rewards: Array,
    values: Array,
    bootstrap_values: Array,
    terminated: Array,
    done: Array,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """Computes advantages and returns (Schulman et al. 2016, eq. 16), all ``[num_steps, num_envs]`` float32.

    ``values`` are V of the observations acted on. ``bootstrap_values`` are V of the observations that followed; where
    an episode was truncated, V of its final observation. Nothing is bootstrapped where ``terminated`` is true or 1.0.
    No advantage flows back across a step where ``done`` (terminated or truncated) is.
    """
    deltas = rewards + gamma * jnp.where(terminated > 0, 0.0, bootstrap_values) - values

    def step(following: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, ends = now
        advantage = delta + jnp.where(ends, 0.0, gamma * gae_lambda * following)
        return advantage, advantage

    _, advantages = lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, done > 0), reverse=True)
    return advantages, advantages + values


def group_advantages(returns: Array, magnitudes: Array, normalize_std: bool) -> Array:
    """Computes group-relative advantages, float64 (Shao et al. 2024, section 4.1.2).

    They are 0 in a group whose returns differ only as equal returns of float32 rewards may: the division would make
    advantages of about 1 of the rounding.

    Args:
        returns: ``[groups, group_size]``.
        magnitudes: the sums of absolute rewards, of the same shape.
        normalize_std: whether to divide by the group's population standard deviation; Liu et al. 2025, section 3.2,
            don't.
    """
    with jax.enable_x64(True):
        returns = returns.astype(jnp.float64)
        centred = returns - returns.mean(1, keepdims=True)
        if not normalize_std:
            return centred
        std = jnp.sqrt(jnp.square(centred).mean(1, keepdims=True))
        alike = std <= GROUP_ROUNDING * magnitudes.astype(jnp.float64).max(1, keepdims=True)  # NaN isn't
        return jnp.where(alike, 0.0, centred / (std + GROUP_EPSILON))


def moments(x: Array) -> Array:
    """Computes the mean and the sum of squared deviations over the last axis in float64: ``[…, n]`` to ``[…, 2]``."""
    with jax.enable_x64(True):
        x = x.astype(jnp.float64)
        mean = x.mean(-1, keepdims=True)
        return jnp.concatenate([mean, jnp.square(x - mean).sum(-1, keepdims=True)], -1)


def counted_moments(x: Array, valid: Array | None) -> Array:
    """Computes count, mean and M2 over the last axis in float64: ``[…, n]`` to ``[…, 3]``.

    ``valid`` is true or 1.0 where an entry counts; None: all count. Entries that don't count may be anything, even NaN.
    """
    with jax.enable_x64(True):
        if valid is None:
            both = moments(x)
            return jnp.concatenate([jnp.full_like(both[..., :1], x.shape[-1]), both], -1)
        counts = valid > 0
        x = jnp.where(counts, x.astype(jnp.float64), 0.0)
        count = counts.astype(jnp.float64).sum(-1, keepdims=True)
        mean = x.sum(-1, keepdims=True) / jnp.maximum(count, 1.0)
        m2 = jnp.where(counts, jnp.square(x - mean), 0.0).sum(-1, keepdims=True)
        return jnp.concatenate([count, mean, m2], -1)


def merge_counts(parts: Array) -> tuple[Array, Array, Array]:
    """Merges the moments of shards into those of their union, in shard order (Chan et al. 1983).

    Args:
        parts: each shard's count, mean and M2, float64 ``[num_shards, …, 3]``.

    Returns:
        Count, mean and population standard deviation ``[…]``, float64; 0 where nothing counts.
    """

    def add(merged: tuple[Array, Array, Array], part: Array) -> tuple[tuple[Array, Array, Array], None]:
        count, mean, m2 = merged
        n, its_mean, its_m2 = (part[..., k] for k in range(3))
        total = jnp.maximum(count + n, 1.0)
        delta = its_mean - mean
        mean = mean + delta * (n / total)
        m2 = m2 + its_m2 + delta * delta * (count * n / total)
        return (count + n, mean, m2), None

    with jax.enable_x64(True):
        first = (parts[0, ..., 0], parts[0, ..., 1], parts[0, ..., 2])
        if len(parts) > UNROLLED_SHARDS:
            first, _ = lax.scan(add, first, parts[1:])
        else:
            for part in parts[1:]:
                first, _ = add(first, part)
        count, mean, m2 = first
        return count, mean, jnp.sqrt(m2 / jnp.maximum(count, 1.0))
