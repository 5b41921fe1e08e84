"""Takes the decisions of an optimiser step on the device, from combined values; the host reads nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.config.algorithms import PPOConfig
from lockstep.torch_engine.accelerated.report import Report
from lockstep.training.limits import (
    CLIP_EPSILON,
    KL_NOISE,
    KL_STOP_FACTOR,
    LARGE_KL,
    LEARNING_RATE_FACTOR,
    LEARNING_RATE_LIMITS,
    SMALL_KL,
)


def adapted_learning_rate(learning_rate: Tensor, kl: Tensor, desired_kl: float) -> Tensor:
    """Divides a rate ``[]`` by 1.5 if KL is above twice the desired one; multiplies it by 1.5 if below half of it.

    The rule is rsl_rl's (Schwarke et al. 2025). A KL of rounding alone, up to :data:`KL_NOISE` of the desired one,
    changes nothing.
    """
    low, high = LEARNING_RATE_LIMITS
    down = (learning_rate / LEARNING_RATE_FACTOR).clamp(min=low)
    up = (learning_rate * LEARNING_RATE_FACTOR).clamp(max=high)
    small = (kl > KL_NOISE * desired_kl) & (kl < SMALL_KL * desired_kl)
    return torch.where(kl > LARGE_KL * desired_kl, down, torch.where(small, up, learning_rate))


def clip(vector: Tensor, norm: Tensor, max_norm: float | None) -> Tensor:
    """Clips a gradient ``[P]`` in place by its global norm ``[]``; None: doesn't clip."""
    if max_norm is None:
        return vector
    limited = norm + CLIP_EPSILON
    return vector.mul_(torch.where(limited > max_norm, max_norm / limited, 1.0))


def decide(
    report: Report, rate: Tensor, terms: Tensor, norm: Tensor, number: Tensor, kl: int, ppo: PPOConfig
) -> Tensor:
    """Adds a minibatch to the report, adapts the rate, and returns whether its gradient is applied, bool ``[]``.

    Nothing counts after a minibatch that stopped the update or wasn't finite. The rate also follows one that stops it.

    Args:
        report: of the update so far; changed in place.
        rate: float32 ``[]``, changed in place if the schedule is adaptive.
        terms: the minibatch's loss terms ``[T]``.
        norm: of the whole gradient ``[]``; not finite if the gradient isn't.
        number: index of the minibatch in the update ``[]``.
        kl: index of ``approx_kl`` in ``terms``.
        ppo: limits and schedule.
    """
    terms, norm = terms.double(), norm.double()
    going = (report.stopped == 0.0) & (report.failed < 0.0)
    finite = torch.isfinite(norm) & torch.isfinite(terms).all()
    counted, broken = going & finite, going & ~finite
    report.failed.copy_(torch.where(broken, number.double(), report.failed))
    report.failed_terms.copy_(torch.where(broken, terms, report.failed_terms))
    report.terms.add_(torch.where(counted, terms, 0.0))
    report.evaluated.add_(counted)
    applied = counted
    if ppo.target_kl is not None:
        stops = counted & (terms[kl] > KL_STOP_FACTOR * ppo.target_kl)
        report.stopped.add_(stops)
        applied = counted & ~stops
    if ppo.schedule == "adaptive":
        rate.copy_(torch.where(counted, adapted_learning_rate(rate, terms[kl], ppo.desired_kl), rate))
    report.learning_rate.copy_(rate)
    report.grad_norm.add_(torch.where(applied, norm, 0.0))
    report.steps.add_(applied)
    return applied
