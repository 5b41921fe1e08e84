"""Gathers what shards must know of each other once an iteration: moments, counts and stop codes, in one collective."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import UNROLLED_SHARDS, counted_moments, merge_counts
from lockstep.jax_engine.batch import Batch
from lockstep.jax_engine.distributed.placement import fetch
from lockstep.jax_engine.distributed.reductions import gather_devices, shards_alone
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.normalizers import Moments, merged, vectors_of
from lockstep.jax_engine.state import TrainState
from lockstep.training.limits import RETURN_ROUNDING, non_finite_statistics

FINITE = "finite/"
"""Prefix of the metrics that say whether moments are finite."""


class Statistics(NamedTuple):
    """Statistics of blocks or shards, float64: a device's own, or those of all gathered in shard order.

    Attributes:
        advantage_moments: ``[shards, num_epochs, num_minibatches, 3]``: count, mean and M2.
        value_moments: moments of returns and of returns minus values, ``[blocks, 2, 3]``; None without a critic.
        observation_moments: ``[blocks, size, 3]``, or None.
        return_moments: of discounted returns ``[blocks, 1, 3]``, or None.
        terms: means of named reward terms ``[blocks, n]``, or None.
    """

    advantage_moments: Array
    value_moments: Array | None
    observation_moments: Array | None
    return_moments: Array | None
    terms: Array | None


class NormalizerMoments(NamedTuple):
    """Count, mean and M2 ``[…, size, 3]`` of a rollout's observations and discounted returns, float64, or None."""

    observations: Array | None
    returns: Array | None


def moments_of_values(batch: Batch) -> Array | None:
    """Computes count, mean and M2 of a block's returns and of returns minus values: float64 ``[2, 3]``."""
    if batch.returns is None or batch.values is None:
        return None
    returns, values = batch.returns.reshape(-1), batch.values.reshape(-1)
    with jax.enable_x64(True):
        error = returns.astype(jnp.float64) - values.astype(jnp.float64)
        return jnp.stack([counted_moments(returns, None), counted_moments(error, None)])


def normalizer_moments(
    config: Config, net: PolicyNet, rollout: Rollout, discounted: Array
) -> tuple[NormalizerMoments, Array]:
    """Computes the moments of a block's observations and discounted returns, and the last discounted returns ``[n]``.

    ``discounted`` is each environment's discounted return before the rollout, float32 ``[n]``.
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
    return NormalizerMoments(observations, returns), discounted


def share(local: Statistics, stop: Array) -> tuple[Statistics, Array]:
    """Gathers every block's statistics in shard order, and the highest stop code of the processes; one collective.

    ``stop`` is this process's stop code, int32 ``[1]``; the highest is ``[]``.
    """
    with jax.enable_x64(True):
        parts = [x for x in local if x is not None]
        flat = jnp.concatenate([x.astype(jnp.float64).reshape(-1) for x in (stop, *parts)])[None]
        rows = gather_devices(flat)
        ends = np.cumsum([1, *(int(np.prod(x.shape)) for x in parts)])
        stops, *columns = jnp.split(rows, ends[:-1], 1)
        shaped = iter(shards_alone(x.reshape(-1, *part.shape[1:])) for x, part in zip(columns, parts, strict=True))
        everyone = Statistics(*(None if x is None else next(shaped) for x in local))  # pyright: ignore[reportArgumentType]
        return everyone, stops.max().astype(jnp.int32)


def mean_terms(names: list[str], terms: Array | None) -> dict[str, Array]:
    """Averages named reward terms ``[blocks, n]`` over blocks, float32, as metrics."""
    if terms is None:
        return {}
    with jax.enable_x64(True):
        means = terms.mean(0).astype(jnp.float32)
    return {f"reward/{name}": means[number] for number, name in enumerate(names)}


def explained_variance(value_moments: Array) -> Array:
    """Computes 1 - Var(returns - values) / Var(returns) over all samples, float32.

    Returns NaN if returns vary by no more than float32 rounds them; they are made of residuals and values.
    """
    with jax.enable_x64(True):
        _, mean, std = merge_counts(value_moments)
        varies = std[0] > RETURN_ROUNDING * (jnp.abs(mean).sum() + std[1])
        variance = jnp.square(std)
        ratio = 1.0 - variance[1] / jnp.where(varies, variance[0], 1.0)
        return jnp.where(varies, ratio, jnp.nan).astype(jnp.float32)


def merge_normalizers(state: TrainState, moments: NormalizerMoments) -> TrainState:
    """Merges every shard's moments ``[shards, …]`` into a state's normalisers, in shard order."""
    return state._replace(
        observation_normalizer=_merged(state.observation_normalizer, moments.observations),
        return_normalizer=_merged(state.return_normalizer, moments.returns),
    )


def finite_statistics(state: TrainState) -> dict[str, Array]:
    """Tells, as metrics, whether the normalisers' moments are finite: bool ``[]``, by ``finite/…``."""
    with jax.enable_x64(True):
        return {
            f"{FINITE}{name}": jnp.isfinite(moments.mean).all() & jnp.isfinite(moments.m2).all()
            for name, moments in _normalizers(state).items()
        }


def check_first_statistics(state: TrainState) -> None:
    """Raises a ``NonFiniteError`` if the moments that a random policy gave a state's normalisers aren't finite."""
    for name, moments in _normalizers(state).items():
        if not all(np.isfinite(fetch(x)).all() for x in (moments.mean, moments.m2)):
            raise non_finite_statistics(0, name)


def _normalizers(state: TrainState) -> dict[str, Moments]:
    """Returns the moments that a state has, by what they are of."""
    normalizers = {"observations": state.observation_normalizer, "returns": state.return_normalizer}
    return {name: moments for name, moments in normalizers.items() if moments is not None}


def _merged(moments: Moments | None, parts: Array | None) -> Moments | None:
    if moments is None:
        return None
    assert parts is not None

    def add(moments: Moments, part: Array) -> tuple[Moments, None]:
        return merged(moments, part[0, 0], part[:, 1], part[:, 2]), None

    if len(parts) > UNROLLED_SHARDS:
        with jax.enable_x64(True):
            carried = jax.tree.map(lambda x: x.astype(jnp.float64), moments)  # float32 where only shapes are traced
            return jax.lax.scan(add, carried, parts)[0]
    for part in parts:
        moments, _ = add(moments, part)
    return moments
