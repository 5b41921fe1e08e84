"""What the shards tell each other once an iteration, in one collective: moments, counts, stop codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import counted_moments, merge_counts
from lockstep.jax_engine.batch import Batch
from lockstep.jax_engine.distributed.reductions import gather_shards
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.normalizers import Moments, merged, vectors_of
from lockstep.jax_engine.state import TrainState


class LocalStatistics(NamedTuple):
    """Statistics of a device's blocks or shards, float64.

    Attributes:
        advantages: ``[shards, num_epochs, num_minibatches, 3]``: count, mean and M2.
        fit: of returns and of returns minus values, ``[blocks, 2, 3]``; None without a critic.
        observations: ``[blocks, size, 3]``, or None; ``returns`` of discounted returns ``[blocks, 1, 3]``, or None.
        returns: see ``observations``.
        terms: means of named reward terms ``[blocks, n]``, or None.
    """

    advantages: Array
    fit: Array | None
    observations: Array | None
    returns: Array | None
    terms: Array | None


def fit_moments(batch: Batch) -> Array | None:
    """Count, mean and M2 of returns and of returns minus values of a block: float64 ``[2, 3]``."""
    if batch.returns is None or batch.values is None:
        return None
    returns, values = batch.returns.reshape(-1), batch.values.reshape(-1)
    with jax.enable_x64(True):
        error = returns.astype(jnp.float64) - values.astype(jnp.float64)
        return jnp.stack([counted_moments(returns, None), counted_moments(error, None)])


def normalizer_moments(
    config: Config, net: PolicyNet, rollout: Rollout, discounted: Array
) -> tuple[Array | None, Array | None, Array]:
    """Moments of a block's observations ``[size, 3]`` and discounted returns ``[1, 3]``, and the latter's last values.

    Args:
        config: says what is normalised.
        net: its observation layout.
        rollout: ``[T, n, …]``.
        discounted: each environment's discounted return before the rollout, float32 ``[n]``.
    """
    observations = returns = None
    if config.normalize.observations:
        assert rollout.raw is not None
        vectors = vectors_of(net.observation, rollout.raw)
        observations = counted_moments(vectors.reshape(-1, vectors.shape[-1]).T, None)
    if config.normalize.returns:

        def step(running: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            reward, done = now
            running = running * config.ppo.gamma + reward
            return jnp.where(done, 0.0, running), running

        discounted, running = jax.lax.scan(step, discounted, (rollout.rewards, rollout.done))
        returns = counted_moments(running.reshape(1, -1), None)
    return observations, returns, discounted


class Shared(NamedTuple):
    """Every shard's statistics of one iteration, the same on all devices, as :class:`LocalStatistics`; stop code."""

    statistics: LocalStatistics
    stop: Array


def share(local: LocalStatistics, stop: Array) -> Shared:
    """Gather every block's statistics in shard order: one collective.

    Args:
        local: this device's.
        stop: this process's stop code, int32 ``[1]``.
    """
    with jax.enable_x64(True):
        parts = [x for x in local if x is not None]
        flat = jnp.concatenate([x.astype(jnp.float64).reshape(-1) for x in (stop, *parts)])[None]
        rows = gather_shards(flat)
        ends = np.cumsum([1, *(int(np.prod(x.shape)) for x in parts)])
        stops, *columns = jnp.split(rows, ends[:-1], 1)
        shaped = iter(x.reshape(-1, *part.shape[1:]) for x, part in zip(columns, parts, strict=True))
        return Shared(
            LocalStatistics(*(None if x is None else next(shaped) for x in local)),  # type: ignore[arg-type]
            stops.max().astype(jnp.int32),
        )


def mean_terms(names: list[str], terms: Array | None) -> dict[str, Array]:
    """Means over blocks of named reward terms ``[blocks, n]``, float32, as metrics."""
    if terms is None:
        return {}
    with jax.enable_x64(True):
        means = terms.mean(0).astype(jnp.float32)
    return {f"reward/{name}": means[number] for number, name in enumerate(names)}


def explained_variance(fit: Array) -> Array:
    """1 - Var(returns - values) / Var(returns) over all samples, float32; NaN where returns don't vary."""
    with jax.enable_x64(True):
        _, _, std = merge_counts(fit)
        variance = jnp.square(std)
        ratio = 1.0 - variance[1] / jnp.where(variance[0] > 0, variance[0], 1.0)
        return jnp.where(variance[0] > 0, ratio, jnp.nan).astype(jnp.float32)


def merge_normalizers(state: TrainState, observations: Array | None, returns: Array | None) -> TrainState:
    """Normalisers with every shard's moments ``[…, size, 3]`` merged in shard order."""
    return state._replace(
        observations=_merged(state.observations, observations), returns=_merged(state.returns, returns)
    )


def _merged(moments: Moments | None, parts: Any) -> Moments | None:
    if moments is None:
        return None
    for part in parts:
        moments = merged(moments, part[0, 0], part[:, 1], part[:, 2])
    return moments
