"""Takes the update: epochs of minibatches, one collective per optimiser step, every decision from combined values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.gradients import Gradient, GradientSource
from lockstep.torch_engine.minibatches import MinibatchStatistics, epoch_minibatches
from lockstep.torch_engine.state import TrainState
from lockstep.training.limits import (
    CLIP_EPSILON,
    KL_NOISE,
    KL_STOP_FACTOR,
    LARGE_KL,
    LEARNING_RATE_FACTOR,
    LEARNING_RATE_LIMITS,
    SMALL_KL,
    minibatch_name,
    non_finite,
)
from lockstep.training.losses import loss_settings
from lockstep.training.metrics import Record, update_metrics
from lockstep.training.schedules import scheduled_coefficients, scheduled_learning_rate


@dataclass
class UpdateResult:
    """Sums up what an update did; the same on every rank.

    Attributes:
        terms: sums of the loss terms over the ``evaluated`` minibatches, the one that stopped it included.
        grad_norm: sum of the gradient's norms over optimiser steps; ``steps`` is their number.
        coefficients: the scheduled coefficients of the loss by name.
    """

    terms: np.ndarray
    evaluated: int = 0
    grad_norm: float = 0.0
    steps: int = 0
    stopped_by_kl: bool = False
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def result(self) -> UpdateResult:
        """Returns itself: there is nothing to wait for."""
        return self

    def metrics(self, config: Config, learning_rate: float) -> Record:
        """Returns ``train/…`` of the metrics record, means over the minibatches."""
        return update_metrics(
            loss_settings(config),
            self.terms.tolist(),
            self.evaluated,
            self.grad_norm,
            self.steps,
            self.stopped_by_kl,
            learning_rate,
            self.coefficients,
        )


def adapted_learning_rate(learning_rate: float, kl: float, desired_kl: float) -> float:
    """Divides the rate by 1.5 if KL is above twice the desired one, and multiplies it by 1.5 if KL is below half of it.

    The rule is rsl_rl's (Schwarke et al. 2025). A KL of rounding alone, up to :data:`KL_NOISE` of the desired one,
    changes nothing.
    """
    low, high = LEARNING_RATE_LIMITS
    if kl > LARGE_KL * desired_kl:
        return max(low, learning_rate / LEARNING_RATE_FACTOR)
    if KL_NOISE * desired_kl < kl < SMALL_KL * desired_kl:
        return min(high, learning_rate * LEARNING_RATE_FACTOR)
    return learning_rate


def decide(state: TrainState, result: UpdateResult, config: Config, kl: float) -> None:
    """Decides by the KL divergence of all ranks whether the update stops, and adapts the learning rate.

    The rate also follows a divergence that stops the update: without the largest ones it would only ever grow.
    """
    ppo = config.ppo
    if ppo.target_kl is not None and kl > KL_STOP_FACTOR * ppo.target_kl:
        result.stopped_by_kl = True
    if ppo.schedule == "adaptive":
        state.learning_rate = adapted_learning_rate(state.learning_rate, kl, ppo.desired_kl)


def clip_and_step(state: TrainState, gradient: Gradient, max_norm: float | None, learning_rate: float) -> None:
    """Clips a reduced gradient in place by its global norm (None: doesn't clip), and applies it."""
    vector, norm = gradient.vector, float(gradient.norm)
    if max_norm is not None and norm + CLIP_EPSILON > max_norm:
        vector *= max_norm / (norm + CLIP_EPSILON)
    state.optimizer_steps += 1
    state.optimizer.step(vector, learning_rate)


def begin_update(state: TrainState, config: Config) -> dict[str, float]:
    """Sets the learning rate and the loss's coefficients for the iteration that begins, as their schedules say.

    Returns:
        The scheduled coefficients by name; ``state.coefficients`` holds them on its device.
    """
    state.learning_rate = scheduled_learning_rate(config, state.global_step, state.learning_rate)
    coefficients = scheduled_coefficients(config, state.global_step)
    for name, value in coefficients.items():
        state.coefficients[name].fill_(value)
    return coefficients


def update(
    state: TrainState,
    batch: Batch,
    indices: np.ndarray,
    statistics: MinibatchStatistics,
    config: Config,
    plan: ShardPlan,
    source: GradientSource,
) -> UpdateResult:
    """Trains on one rollout.

    Raises:
        NonFiniteError: on every rank at the same step, before the optimiser takes it, if loss or gradient isn't finite.
    """
    ppo, names = config.ppo, loss_settings(config).terms
    result = UpdateResult(terms=np.zeros(len(names)), coefficients=begin_update(state, config))
    for epoch in range(ppo.num_epochs):
        for number, columns in enumerate(epoch_minibatches(state, batch, indices, statistics, epoch, config, plan)):
            gradient = source(columns, int(statistics.counts[epoch, number]))
            terms, norm = gradient.terms.double().cpu().numpy(), float(gradient.norm)
            if not (math.isfinite(norm) and all(map(math.isfinite, terms.tolist()))):
                where = minibatch_name(config, epoch * ppo.num_minibatches + number)
                raise non_finite(state.iteration + 1, where, names, terms, custom=config.network.custom)
            result.terms += terms
            result.evaluated += 1
            decide(state, result, config, float(terms[names.index("approx_kl")]))
            if result.stopped_by_kl:
                return result
            clip_and_step(state, gradient, ppo.max_grad_norm, state.learning_rate)
            result.grad_norm += norm
            result.steps += 1
            life.progressed()
    return result
