"""The decisions of an optimiser step, taken on the device from combined values: nothing here is looked at."""

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
    """Divides a rate ``[]`` by 1.5 above twice the desired KL, multiplies below half (Schwarke et al. 2025).

    A KL of rounding alone, :data:`KL_NOISE`, changes nothing.
    """
    low, high = LEARNING_RATE_LIMITS
    down = (learning_rate / LEARNING_RATE_FACTOR).clamp(min=low)
    up = (learning_rate * LEARNING_RATE_FACTOR).clamp(max=high)
    small = (kl > KL_NOISE * desired_kl) & (kl < SMALL_KL * desired_kl)
    return torch.where(kl > LARGE_KL * desired_kl, down, torch.where(small, up, learning_rate))


def clip(vector: Tensor, norm: Tensor, max_norm: float | None) -> Tensor:
    """Clips a gradient ``[P]``, whose memory is used up, by its global norm ``[]``; None: not."""
    if max_norm is None:
        return vector
    limited = norm + CLIP_EPSILON
    return vector.mul_(torch.where(limited > max_norm, max_norm / limited, 1.0))


def decide(
    report: Report, rate: Tensor, terms: Tensor, norm: Tensor, number: Tensor, kl: int, ppo: PPOConfig
) -> Tensor:
    """Takes a minibatch into the report and the rate, and tells whether its gradient is applied, bool ``[]``.

    Nothing counts after a minibatch that stopped the update or wasn't finite. The rate follows one that stops it too.

    Args:
        report: of the update so far; changed in place.
        rate: float32 ``[]``, changed in place where the schedule is adaptive.
        terms: the minibatch's loss terms ``[T]``; ``kl`` is the place of ``approx_kl`` among them.
        norm: of the whole gradient ``[]``; not a finite number where the gradient isn't one.
        number: index of the minibatch in the update ``[]``.
        kl: see ``terms``.
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
