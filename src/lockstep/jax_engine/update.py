"""The update: epochs of minibatches, one collective per optimiser step, every decision from combined values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.distributed.reductions import sum_devices
from lockstep.jax_engine.gradients import gradient_parts, part_gradient
from lockstep.jax_engine.minibatches import MinibatchStatistics
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import ParameterLayout
from lockstep.jax_engine.shards.blocks import Blocks
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.words import Words
from lockstep.jax_engine.state import TrainState, adam
from lockstep.training.limits import CLIP_EPSILON, KL_STOP_FACTOR, LEARNING_RATE_FACTOR, LEARNING_RATE_LIMITS
from lockstep.training.losses import loss_settings

NOTHING_FAILED = -1


class UpdateResult(NamedTuple):
    """What an update did, on every device the same.

    Attributes:
        terms: sums of the loss terms over the minibatches that were evaluated, the one that stopped it included.
        evaluated: number of those minibatches.
        grad_norm: sum over optimiser steps; ``steps`` their number.
        steps: see ``grad_norm``.
        stopped_by_kl: whether the KL stop ended it.
        failed: index of the first minibatch whose loss or gradient was not finite, or -1; nothing was applied from it
            on. ``failed_terms`` are its loss terms.
        failed_terms: see ``failed``.
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
        """Of no minibatch yet."""
        zero, none = jnp.zeros(terms), jnp.zeros((), jnp.int32)
        return cls(zero, none, jnp.zeros(()), none, jnp.zeros((), jnp.bool_), none + NOTHING_FAILED, zero)


class Learner(NamedTuple):
    """What an optimiser step changes: parameters, Adam's state, the learning rate."""

    parameters: Any
    optimizer: optax.ScaleByAdamState
    learning_rate: Array


def adapted_learning_rate(learning_rate: Array, kl: Array, desired_kl: float) -> Array:
    """Down by 1.5 above twice the desired KL, up by 1.5 below half of it (rsl_rl; Schwarke et al. 2025)."""
    low, high = LEARNING_RATE_LIMITS
    down = jnp.maximum(low, learning_rate / LEARNING_RATE_FACTOR)
    up = jnp.minimum(high, learning_rate * LEARNING_RATE_FACTOR)
    small = (kl > 0.0) & (kl < 0.5 * desired_kl)
    return jnp.where(kl > 2.0 * desired_kl, down, jnp.where(small, up, learning_rate))


def clip_and_step(learner: Learner, gradient: Any, norm: Array, config: Config) -> Learner:
    """Clip a reduced gradient by its global norm and apply it."""
    limit = config.ppo.max_grad_norm
    if limit is not None:
        factor = jnp.where(norm + CLIP_EPSILON > limit, limit / (norm + CLIP_EPSILON), 1.0)
        gradient = jax.tree.map(lambda g: g * factor, gradient)
    direction, optimizer = adam(config).update(gradient, learner.optimizer)
    parameters = jax.tree.map(lambda p, d: p - learner.learning_rate * d, learner.parameters, direction)
    return Learner(parameters, optimizer, learner.learning_rate)  # type: ignore[arg-type]


class Update:
    """The optimiser steps of one iteration on one device's blocks.

    Args:
        config: the run's.
        net: its networks.
        layout: how parameters are held.
        blocks: how shards are grouped.
        words: how columns lie in a block's matrix.
        devices: of the mesh.
    """

    def __init__(
        self, config: Config, net: PolicyNet, layout: ParameterLayout, blocks: Blocks, words: Words, devices: int
    ) -> None:
        self.config, self.net, self.layout, self.blocks, self.words = config, net, layout, blocks, words
        self.devices = devices
        self.names = loss_settings(config).terms

    def gradients(self, parameters: Any, samples: Array, now: Any, owned: Array) -> Any:
        """Gradients and loss terms of one minibatch, packed by the layout; see :meth:`Blocks.sum_parts`."""
        index, mean, scale, count, keys = now
        blocks, units, width = samples.shape
        parts = gradient_parts(self.net, self.config, index.shape[-1], keys is not None)

        def one(words: Array, key: Array | None, mean: Any, scale: Any) -> Any:
            columns = self.words.unpack(words)
            if mean is not None:
                extra = (1,) * (columns["advantages"].ndim - 1)
                mean, scale = (x.reshape(-1, *extra) for x in (mean, scale))
                columns["advantages"] = (columns["advantages"] - mean) / scale
            return self.layout.pack(*part_gradient(self.net, parameters, columns, count, self.config, key))

        index = index + units * jnp.arange(blocks, dtype=index.dtype)[:, None]
        if mean is not None:  # of the global minibatch, or of each unit's shard
            mean, scale = (jnp.broadcast_to(x, (blocks, parts)) if x.ndim == 0 else x for x in (mean, scale))
            mean, scale = (jnp.repeat(x, parts // x.shape[1] or 1, 1) for x in (mean, scale))
        if keys is not None and parts > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, parts))(keys)
        chosen = samples.reshape(-1, width)[index]  # of all parts at once: in their loop it takes a tenth longer
        cut = jax.tree.map(lambda x: x.reshape(blocks * parts, -1, *x.shape[2:]), (chosen, mean, scale))
        keys = None if keys is None else keys.reshape(-1)
        return self.blocks.sum_parts(one, parts, owned, cut[0], keys, *cut[1:])

    def step(
        self, learner: Learner, result: UpdateResult, number: Array, samples: Array, now: Any, owned: Array
    ) -> Any:
        """One optimiser step; nothing is applied if it isn't finite, or if the KL stop takes effect."""
        ppo = self.config.ppo
        found = self.gradients(self.layout.named(learner.parameters), samples, now, owned)
        gradient, terms = self.layout.reduce(found)
        norm = self.layout.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(terms).all()
        kl = terms[self.names.index("approx_kl")]
        stops = jnp.zeros((), jnp.bool_)
        if ppo.target_kl is not None:
            stops = finite & (kl > KL_STOP_FACTOR * ppo.target_kl)
        takes = finite & ~stops & (result.failed < 0)
        if ppo.schedule == "adaptive":
            rate = adapted_learning_rate(learner.learning_rate, kl, ppo.desired_kl)
            learner = learner._replace(learning_rate=jnp.where(takes, rate, learner.learning_rate))
        stepped = clip_and_step(learner, gradient, norm, self.config)
        learner = jax.tree.map(lambda new, old: jnp.where(takes, new, old), stepped, learner)
        counts = finite & (result.failed < 0)
        first = ~finite & (result.failed < 0)
        return learner, UpdateResult(
            terms=result.terms + jnp.where(counts, terms, 0.0),
            evaluated=result.evaluated + counts,
            grad_norm=result.grad_norm + jnp.where(takes, norm, 0.0),
            steps=result.steps + takes,
            stopped_by_kl=result.stopped_by_kl | stops,
            failed=jnp.where(first, number, result.failed),
            failed_terms=jnp.where(first, terms, result.failed_terms),
        )

    def __call__(
        self, learner: Learner, samples: Array, indices: Array, statistics: MinibatchStatistics, keys: Any, owned: Array
    ) -> tuple[Learner, UpdateResult]:
        """Train on one rollout.

        Args:
            learner: before the update.
            samples: packed columns ``[blocks, units, words]``.
            indices: ``[blocks, num_epochs, num_minibatches, n]``.
            statistics: of the global minibatches.
            keys: of dropout ``[blocks, …]``, or None.
            owned: number of shards, see :meth:`Blocks.each`.
        """
        total = self.config.ppo.num_epochs * self.config.ppo.num_minibatches
        numbers = jnp.arange(total, dtype=jnp.int32)
        flat = jnp.moveaxis(indices.reshape(len(indices), total, -1), 1, 0)
        rest = [None if x is None else x.reshape(total, *x.shape[2:]) for x in (statistics.mean, statistics.scale)]
        dropout = None if keys is None else jax.vmap(lambda n: jax.vmap(lambda k: keyed(k, n))(keys))(numbers)
        each = (flat, *rest, statistics.counts.reshape(total), dropout)
        start = (learner, UpdateResult.empty(len(self.names)))
        if self.config.sync_period > 1:
            return self.periodic(start, samples, numbers, each, owned)

        def body(carry: Any, now: Any) -> Any:
            number, minibatch = now

            def do(carry: Any) -> Any:
                learner, result = carry
                return self.step(learner, result, number, samples, minibatch, owned)

            if self.config.ppo.target_kl is None:
                return do(carry), None
            return lax.cond(carry[1].stopped_by_kl, lambda carry: carry, do, carry), None

        return lax.scan(body, start, (numbers, each))[0]

    def periodic(self, start: Any, samples: Array, numbers: Array, each: Any, owned: Array) -> Any:
        """Local steps with periodic averaging (local SGD; Stich 2019), as the torch engine's ``periodic``.

        Each device takes ``sync_period`` optimiser steps on gradients of its own samples; then parameters and both of
        Adam's moments are averaged over devices, in one collective together with the loss terms. KL stop and adaptive
        learning rate look at the mean KL of a whole period, once it is over.
        """
        period, total = self.config.sync_period, len(numbers)
        whole = total // period * period
        cut = jax.tree.map(lambda x: x[:whole].reshape(-1, period, *x.shape[1:]), (numbers, each))
        carry = lax.scan(lambda c, now: (self._period(c, samples, now, owned), None), start, cut)[0]
        if whole < total:
            carry = self._period(carry, samples, jax.tree.map(lambda x: x[whole:], (numbers, each)), owned)
        return carry

    def _period(self, carry: Any, samples: Array, now: Any, owned: Array) -> Any:
        def do(carry: Any) -> Any:
            learner, result = carry
            zeros = (jnp.zeros(len(self.names)), jnp.zeros(()), jnp.zeros(()))
            (after, seen), _ = lax.scan(
                lambda c, x: (self._local(c, samples, x, owned), None), (learner, zeros), now[1]
            )
            return self._together(learner, after, seen, result, now[0][-1], len(now[0]))

        skip = carry[1].stopped_by_kl | (carry[1].failed >= 0)
        return lax.cond(skip, lambda carry: carry, do, carry)

    def _local(self, carry: Any, samples: Array, now: Any, owned: Array) -> Any:
        """One optimiser step on this device's own samples; carries sums of terms, norms and failures on."""
        learner, seen = carry
        found = self.gradients(self.layout.named(learner.parameters), samples, now, owned).sum(0)
        gradient, local = found[: self.layout.size] * self.devices, found[self.layout.size :]
        norm = self.layout.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(local).all()
        learner = clip_and_step(learner, gradient, norm, self.config)
        return learner, (seen[0] + local, seen[1] + norm, seen[2] + ~finite)

    def _together(
        self, before: Learner, after: Learner, seen: Any, result: UpdateResult, number: Array, steps: int
    ) -> tuple[Learner, UpdateResult]:
        """Average a period over devices, in one collective, and decide what is to be decided."""
        ppo, size = self.config.ppo, self.layout.size
        vectors = [after.parameters, after.optimizer.mu, after.optimizer.nu]
        packed = jnp.concatenate([*vectors, seen[0], seen[1][None], seen[2][None]])
        total, devices = sum_devices(packed), self.devices
        parameters, mu, nu = (total[n * size : (n + 1) * size] / devices for n in range(3))
        terms, norm, broken = total[3 * size : -2], total[-2] / devices, total[-1]
        finite = (broken == 0) & jnp.isfinite(terms).all()
        kl = terms[self.names.index("approx_kl")] / steps
        stops = jnp.zeros((), jnp.bool_) if ppo.target_kl is None else finite & (kl > KL_STOP_FACTOR * ppo.target_kl)
        rate = after.learning_rate
        if ppo.schedule == "adaptive":
            rate = jnp.where(stops, rate, adapted_learning_rate(rate, kl, ppo.desired_kl))
        optimizer = optax.ScaleByAdamState(after.optimizer.count, mu, nu)
        learner = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), Learner(parameters, optimizer, rate), before
        )
        return learner, UpdateResult(
            terms=result.terms + jnp.where(finite, terms, 0.0),
            evaluated=result.evaluated + finite * steps,
            grad_norm=result.grad_norm + jnp.where(finite, norm, 0.0),
            steps=result.steps + finite * steps,
            stopped_by_kl=result.stopped_by_kl | stops,
            failed=jnp.where(finite, result.failed, number),
            failed_terms=jnp.where(finite, result.failed_terms, terms),
        )


def learner_of(state: TrainState, learning_rate: Array) -> Learner:
    """What the update changes of a state, with the learning rate of this iteration."""
    return Learner(state.parameters, state.optimizer, learning_rate)
