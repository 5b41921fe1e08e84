"""Local optimiser steps with periodic averaging over devices (local SGD; Stich 2019)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.distributed.reductions import sum_devices
from lockstep.jax_engine.update import (
    Gradients,
    Learner,
    Minibatch,
    Progress,
    UpdateResult,
    clip_and_step,
    decide,
)


class Local(NamedTuple):
    """A device's own steps within a period: sums of loss terms ``[T]`` and norms, and how many steps weren't finite."""

    learner: Learner
    terms: Array
    norm: Array
    broken: Array


class PeriodicUpdate:
    """Takes ``sync_period`` optimiser steps on each device's own samples, then averages over devices.

    Parameters and both of Adam's moments are averaged, in one collective together with the loss terms. KL stop and
    adaptive learning rate are decided after each period, from its mean KL.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.config, self.layout = gradients, gradients.config, gradients.layout

    def __call__(
        self, learner: Learner, samples: Array, numbers: Array, minibatches: Minibatch, owned: Array
    ) -> Progress:
        """Trains on one rollout; takes the arguments of :meth:`lockstep.jax_engine.update.Update.__call__`."""
        start = Progress(learner, UpdateResult.empty(len(self.gradients.terms)))
        period, total = self.config.sync_period, len(numbers)
        whole = total // period * period
        cut = jax.tree.map(lambda x: x[:whole].reshape(-1, period, *x.shape[1:]), (numbers, minibatches))
        progress = lax.scan(lambda p, now: (self._period(p, samples, now[0], now[1], owned), None), start, cut)[0]
        if whole < total:
            last, rest = jax.tree.map(lambda x: x[whole:], (numbers, minibatches))
            progress = self._period(progress, samples, last, rest, owned)
        return progress

    def _period(self, progress: Progress, samples: Array, numbers: Array, now: Minibatch, owned: Array) -> Progress:
        """Takes the steps of one period, unless the update has ended."""

        def do(progress: Progress) -> Progress:
            start = Local(progress.learner, jnp.zeros(len(self.gradients.terms)), jnp.zeros(()), jnp.zeros(()))
            after, _ = lax.scan(lambda local, x: (self._step(local, samples, x, owned), None), start, now)
            return self._together(progress, after, numbers[-1], len(numbers))

        skip = progress.result.stopped_by_kl | (progress.result.failed >= 0)
        return lax.cond(skip, lambda progress: progress, do, progress)

    def _step(self, local: Local, samples: Array, now: Minibatch, owned: Array) -> Local:
        """Takes one optimiser step on this device's own samples."""
        learner, size = local.learner, self.layout.size
        parameters = self.layout.named(learner.parameters)
        found = self.gradients.of_minibatch(parameters, samples, now, owned).sum(0)
        gradient, terms = found[:size] * self.gradients.devices, found[size:]
        norm = self.layout.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(terms).all()
        learner = clip_and_step(learner, gradient, norm, self.config)
        return Local(learner, local.terms + terms, local.norm + norm, local.broken + ~finite)

    def _together(self, before: Progress, local: Local, number: Array, steps: int) -> Progress:
        """Averages a period over devices in one collective, and decides on KL stop and learning rate."""
        size, devices = self.layout.size, self.gradients.devices
        after, result = local.learner, before.result
        vectors = [after.parameters, after.optimizer.mu, after.optimizer.nu]
        total = sum_devices(jnp.concatenate([*vectors, local.terms, local.norm[None], local.broken[None]]))
        parameters, mu, nu = (total[n * size : (n + 1) * size] / devices for n in range(3))
        terms, norm, broken = total[3 * size : -2], total[-2] / devices, total[-1]
        finite = (broken == 0) & jnp.isfinite(terms).all()
        kl = terms[self.gradients.terms.index("approx_kl")] / steps
        stops, rate = decide(self.config, after.learning_rate, kl, finite)
        averaged = Learner(parameters, optax.ScaleByAdamState(after.optimizer.count, mu, nu), rate)
        learner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), averaged, before.learner)
        result = UpdateResult(
            terms=result.terms + jnp.where(finite, terms, 0.0),
            evaluated=result.evaluated + finite * steps,
            grad_norm=result.grad_norm + jnp.where(finite, norm, 0.0),
            steps=result.steps + finite * steps,
            stopped_by_kl=result.stopped_by_kl | stops,
            failed=jnp.where(finite, result.failed, number),
            failed_terms=jnp.where(finite, result.failed_terms, terms),
        )
        return Progress(learner, result)
