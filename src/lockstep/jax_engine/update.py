"""The update: epochs of minibatches, with one collective per optimiser step and all decisions from combined values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import optax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.gradients import gradient_parts, part_gradient
from lockstep.jax_engine.minibatches import MinibatchStatistics
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import Held, Named, ParameterLayout
from lockstep.jax_engine.shards.blocks import Blocks
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.packing import PackedLayout
from lockstep.jax_engine.state import adam
from lockstep.training.limits import (
    CLIP_EPSILON,
    KL_NOISE,
    KL_STOP_FACTOR,
    LARGE_KL,
    LEARNING_RATE_FACTOR,
    LEARNING_RATE_LIMITS,
    SMALL_KL,
)
from lockstep.training.losses import loss_settings

NOTHING_FAILED = -1


class UpdateResult(NamedTuple):
    """The result of an update, the same on every device.

    Attributes:
        terms: sums of the loss terms over the minibatches evaluated, including the one that stopped the update.
        evaluated: number of those minibatches.
        grad_norm: sum over optimiser steps; ``steps`` is their number.
        stopped_by_kl: whether the KL stop ended the update.
        failed: index of the first minibatch whose loss or gradient was not finite, or -1; no step was applied from it
            on. ``failed_terms`` are its loss terms. With ``sync_period``: the last one of the first period that had
            such a minibatch, and the period's sums.
    """

    terms: Array
    evaluated: Array
    grad_norm: Array
    steps: Array
    stopped_by_kl: Array
    failed: Array
    failed_terms: Array

    @classmethod
    def empty(cls, terms: int) -> UpdateResult:
        """Makes the result before the first minibatch, with ``terms`` loss terms."""
        zero, none = jnp.zeros(terms), jnp.zeros((), jnp.int32)
        return cls(zero, none, jnp.zeros(()), none, jnp.zeros((), jnp.bool_), none + NOTHING_FAILED, zero)

    def result(self) -> UpdateResult:
        """Returns itself, as :meth:`Tally.result` returns the unpacked result."""
        return self


class Tally(NamedTuple):
    """An :class:`UpdateResult` under way, packed into one array per dtype because many small arrays cost more to carry.

    Attributes:
        floats: loss terms, failed terms, and the sum of gradient norms, float32 ``[2T + 1]``.
        counts: minibatches evaluated, steps, whether the KL stop ended it, first minibatch that failed, int32 ``[4]``.
    """

    floats: Array
    counts: Array

    @classmethod
    def of(cls, result: UpdateResult) -> Tally:
        """Packs a result."""
        counts = (result.evaluated, result.steps, result.stopped_by_kl, result.failed)
        floats = jnp.concatenate([result.terms, result.failed_terms, result.grad_norm[None]])
        return cls(floats, jnp.stack([x.astype(jnp.int32) for x in counts]))

    def result(self) -> UpdateResult:
        """Unpacks the result."""
        terms, failed_terms, (grad_norm,) = jnp.split(self.floats, [len(self.floats) // 2, len(self.floats) - 1])
        evaluated, steps, stopped, failed = self.counts
        return UpdateResult(terms, evaluated, grad_norm, steps, stopped != 0, failed, failed_terms)


Tallied = UpdateResult | Tally


class Learner(NamedTuple):
    """What an optimiser step changes: parameters and moments as the layout holds them, and the rate, float32 ``[]``."""

    parameters: Held
    optimizer: optax.ScaleByAdamState
    learning_rate: Array


class Progress(NamedTuple):
    """An update under way: the learner, and the result so far."""

    learner: Learner
    result: UpdateResult


class Minibatch(NamedTuple):
    """One minibatch of every block; all minibatches if the arrays have one more leading axis.

    Attributes:
        indices: of each block's units, int32 ``[blocks, n]``.
        mean: what to subtract from advantages, see :class:`.minibatches.MinibatchStatistics`; None: nothing.
        scale: what to divide them by after that.
        count: valid samples of the global minibatch, float32 ``[]``.
        keys: dropout keys ``[blocks]``, or None.
    """

    indices: Array
    mean: Array | None
    scale: Array | None
    count: Array
    keys: Array | None


def all_minibatches(
    config: Config, indices: Array, statistics: MinibatchStatistics, keys: Array | None
) -> tuple[Array, Minibatch]:
    """Concatenates the minibatches of all epochs, and returns them with their numbers, int32 ``[minibatches]``.

    ``indices`` are ``[blocks, num_epochs, num_minibatches, n]``. ``keys`` are dropout keys ``[blocks]``; each minibatch
    gets keys derived from them.
    """
    total = config.ppo.num_epochs * config.ppo.num_minibatches
    numbers = jnp.arange(total, dtype=jnp.int32)
    flat = jnp.moveaxis(indices.reshape(len(indices), total, -1), 1, 0)
    mean, scale = (None if x is None else x.reshape(total, *x.shape[2:]) for x in (statistics.mean, statistics.scale))
    dropout = None if keys is None else jax.vmap(lambda n: jax.vmap(lambda k: keyed(k, n))(keys))(numbers)
    return numbers, Minibatch(flat, mean, scale, statistics.counts.reshape(total), dropout)


def adapted_learning_rate(learning_rate: Array, kl: Array, desired_kl: float) -> Array:
    """Divides the rate by 1.5 if KL is above twice the desired one, and multiplies it by 1.5 if KL is below half of it.

    The rule is rsl_rl's (Schwarke et al. 2025). A KL that comes from rounding alone, below :data:`KL_NOISE` times the
    desired one, changes nothing.
    """
    low, high = LEARNING_RATE_LIMITS
    down = jnp.maximum(low, learning_rate / LEARNING_RATE_FACTOR)
    up = jnp.minimum(high, learning_rate * LEARNING_RATE_FACTOR)
    small = (kl > KL_NOISE * desired_kl) & (kl < SMALL_KL * desired_kl)
    return jnp.where(kl > LARGE_KL * desired_kl, down, jnp.where(small, up, learning_rate))


def decide(config: Config, learning_rate: Array, kl: Array, finite: Array) -> tuple[Array, Array]:
    """Decides from the KL divergence of all devices whether the update stops, and computes the adaptive learning rate.

    The rate also follows a KL that stops the update: without the largest divergences it would only ever grow.
    """
    ppo = config.ppo
    stops = jnp.zeros((), jnp.bool_) if ppo.target_kl is None else finite & (kl > KL_STOP_FACTOR * ppo.target_kl)
    if ppo.schedule == "adaptive":
        learning_rate = adapted_learning_rate(learning_rate, kl, ppo.desired_kl)
    return stops, learning_rate


def clip_and_step(learner: Learner, gradient: Held, norm: Array, config: Config) -> Learner:
    """Clips a reduced gradient by its global norm and applies it."""
    limit = config.ppo.max_grad_norm
    if limit is not None:
        factor = jnp.where(norm + CLIP_EPSILON > limit, limit / (norm + CLIP_EPSILON), 1.0)
        gradient = jax.tree.map(lambda g: g * factor, gradient)
    direction, optimizer = adam(config).update(gradient, learner.optimizer)
    parameters = jax.tree.map(lambda p, d: p - learner.learning_rate * d, learner.parameters, direction)
    return Learner(parameters, optimizer, learner.learning_rate)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Gradients:
    """Computes the gradients of one device's blocks.

    Attributes:
        words: layout of the columns in a block's matrix.
        devices: number of devices in the mesh; ``platform`` is theirs.
        coefficients: scheduled coefficients of the loss by name, float32 ``[]``; None if none is scheduled.
    """

    config: Config
    net: PolicyNet
    layout: ParameterLayout
    blocks: Blocks
    words: PackedLayout
    devices: int
    platform: str
    coefficients: dict[str, Array] | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, in order."""
        return loss_settings(self.config).terms

    def of_minibatch(self, parameters: Named, samples: Array, now: Minibatch, owned: Array) -> Held:
        """Computes gradients and loss terms of one minibatch, packed by the layout; see :meth:`Blocks.sum_parts`.

        ``parameters`` are whole, ``samples`` are packed columns ``[blocks, units, words]``, and ``owned`` is the number
        of shards.
        """
        blocks, units, width = samples.shape
        parts = gradient_parts(self.net, self.config, now.indices.shape[-1], self.platform)

        def one(words: Array, key: Array | None, mean: Array | None, scale: Array | None) -> Held:
            columns = self.words.unpack(words)
            if mean is not None and scale is not None:
                extra = (1,) * (columns["advantages"].ndim - 1)
                mean, scale = mean.reshape(-1, *extra), scale.reshape(-1, *extra)
                columns["advantages"] = (columns["advantages"] - mean) / scale
            settings = loss_settings(self.config, now.count).scheduled(self.coefficients)
            return self.layout.pack(*part_gradient(self.net, parameters, columns, settings, key, self.platform))

        index = now.indices + units * jnp.arange(blocks, dtype=now.indices.dtype)[:, None]
        mean, scale, keys = now.mean, now.scale, now.keys
        if mean is not None and scale is not None:  # one number for the global minibatch, or one per unit's shard
            mean, scale = (jnp.broadcast_to(x, (blocks, parts)) if x.ndim == 0 else x for x in (mean, scale))
            mean, scale = (jnp.repeat(x, parts // x.shape[1] or 1, 1) for x in (mean, scale))
        if keys is not None and parts > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, parts))(keys)
        chosen = samples.reshape(-1, width)[index]  # for all parts at once, outside their loop
        chosen, mean, scale = jax.tree.map(lambda x: x.reshape(blocks * parts, -1, *x.shape[2:]), (chosen, mean, scale))
        keys = None if keys is None else keys.reshape(-1)
        return self.blocks.sum_parts(one, parts, owned, chosen, keys, mean, scale)


class Update:
    """Takes the optimiser steps of one iteration, one collective each."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.config, self.layout = gradients, gradients.config, gradients.layout

    def __call__(
        self, learner: Learner, samples: Array, numbers: Array, minibatches: Minibatch, owned: Array
    ) -> Progress:
        """Trains on a rollout's samples, packed columns ``[blocks, units, words]``; ``numbers`` count minibatches."""
        begun = self._tallied(UpdateResult.empty(len(self.gradients.terms)))

        def body(carry: tuple[Learner, Tallied], now: tuple[Array, Minibatch]) -> tuple[tuple[Learner, Tallied], None]:
            def do(carry: tuple[Learner, Tallied]) -> tuple[Learner, Tallied]:
                after = self.step(Progress(carry[0], carry[1].result()), samples, *now, owned)
                return after.learner, self._tallied(after.result)

            if self.config.ppo.target_kl is None:
                return do(carry), None
            return lax.cond(carry[1].result().stopped_by_kl, lambda carry: carry, do, carry), None

        learner, tallied = lax.scan(body, (learner, begun), (numbers, minibatches))[0]
        return Progress(learner, tallied.result())

    def _tallied(self, result: UpdateResult) -> Tallied:
        """Packs a result to carry it from step to step.

        With FSDP it stays unpacked: packed, XLA would round the gradient's norm differently, and agents would get other
        bits.
        """
        return result if self.layout.axes else Tally.of(result)

    def step(self, progress: Progress, samples: Array, number: Array, minibatch: Minibatch, owned: Array) -> Progress:
        """Takes one optimiser step; changes no parameters if it isn't finite or the KL stop takes effect."""
        learner, result = progress
        with jax.named_scope("gradients"):
            found = self.gradients.of_minibatch(self.layout.named(learner.parameters), samples, minibatch, owned)
        gradient, terms = self.layout.reduce(found)
        norm = self.layout.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(terms).all()
        kl = terms[self.gradients.terms.index("approx_kl")]
        stops, rate = decide(self.config, learner.learning_rate, kl, finite)
        takes = finite & ~stops & (result.failed < 0)
        if self.config.ppo.schedule == "adaptive":
            counted = finite & (result.failed < 0)
            learner = learner._replace(learning_rate=jnp.where(counted, rate, learner.learning_rate))
        stepped = clip_and_step(learner, gradient, norm, self.config)
        learner = jax.tree.map(lambda new, old: jnp.where(takes, new, old), stepped, learner)
        unbroken = result.failed < 0
        counts, first = finite & unbroken, ~finite & unbroken
        result = UpdateResult(
            terms=result.terms + jnp.where(counts, terms, 0.0),
            evaluated=result.evaluated + counts,
            grad_norm=result.grad_norm + jnp.where(takes, norm, 0.0),
            steps=result.steps + takes,
            stopped_by_kl=result.stopped_by_kl | stops,
            failed=jnp.where(first, number, result.failed),
            failed_terms=jnp.where(first, terms, result.failed_terms),
        )
        return Progress(learner, result)
