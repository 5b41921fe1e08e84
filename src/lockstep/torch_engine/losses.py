"""PPO's loss as sums per shard over a global count; the reference is :func:`lockstep.reference.ppo_loss`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TERMS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


@dataclass(frozen=True)
class LossSettings:
    """Coefficients of the loss; ``count`` is the number of samples of the global minibatch."""

    clip_range: float
    value_clip_range: float | None
    entropy_coef: float
    value_coef: float
    count: int


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Half the squared error; with a clip range the larger of it and the clipped one (Huang et al. 2022, detail 9)."""
    error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def ppo_terms(
    log_prob: Tensor,
    entropy: Tensor,
    values: Tensor,
    old_log_prob: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9), summed over the last axis.

    All arguments are ``[k, rows]`` (or ``[rows]``); advantages are normalised already.

    Returns:
        The loss ``[k]`` and the terms ``[k, 5]`` in the order of :data:`TERMS`, both sums over rows divided by the
        global count; approx_kl is the k3 estimator (Schulman 2020).
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_range, 1.0 + settings.clip_range)
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    value = value_loss(values, old_values, returns, settings.value_clip_range)
    kl = torch.expm1(log_ratio) - log_ratio
    outside = ((ratio - 1.0).abs() > settings.clip_range).to(ratio.dtype)
    terms = torch.stack([x.sum(-1) for x in (policy, value, entropy, kl.detach(), outside)], -1) / settings.count
    loss = terms[..., 0] + settings.value_coef * terms[..., 1] - settings.entropy_coef * terms[..., 2]
    return loss, terms.detach()
