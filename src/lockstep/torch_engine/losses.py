"""The losses of PPO and GRPO: sums over a shard divided by a global count. :mod:`lockstep.reference` has references."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lockstep.training.losses import LossSample, LossSettings, check_shape


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Computes half the squared error; with a clip range, half the larger of it and the clipped one.

    The clipping is that of Huang et al. 2022, detail 9.
    """
    error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def k3(log_ratio: Tensor) -> Tensor:
    """Computes the k3 estimator ``exp(x) - 1 - x`` of a KL divergence (Schulman 2020; Shao et al. 2024, eq. 4)."""
    return torch.expm1(log_ratio) - log_ratio


def surrogate(ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Computes the clipped surrogate objective, negated (Schulman et al. 2017, eq. 7)."""
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ppo_loss(sample: LossSample) -> Tensor:
    """Computes the loss of each sample ``[rows]`` that :func:`loss_and_terms` sums if the user gives no other."""
    ratio = (sample.log_prob - sample.old_log_prob).exp()
    loss = surrogate(ratio, sample.advantage, sample.clip_range) - sample.entropy_coef * sample.entropy
    if sample.value is not None:
        value = value_loss(sample.value, sample.old_value, sample.return_, sample.value_clip_range)
        loss = loss + sample.value_coef * value
    if sample.kl_coef:
        loss = loss + sample.kl_coef * k3(sample.reference_log_prob - sample.log_prob)
    return loss


def own_losses(named: Mapping[str, Tensor | None], settings: LossSettings) -> Tensor:
    """Computes the user's own loss of each sample ``[k, rows]``, from tensors ``[k, rows, …]`` by field name.

    The loss is called shard by shard on copies of each shard's samples, so that a shard's bits don't depend on its
    neighbours, whatever the loss does.

    Raises:
        ValueError: if it returns anything but one loss per sample; the message is one line.
    """
    assert settings.loss is not None
    log_prob = named["log_prob"]
    assert log_prob is not None
    shards, rows = log_prob.shape
    parts = {name: [None] * shards if x is None else [part.clone() for part in x.unbind()] for name, x in named.items()}
    losses = []
    for shard in range(shards):
        of_shard = settings.loss(settings.sample(ppo_loss, **{name: part[shard] for name, part in parts.items()}))
        check_shape(of_shard, rows, Tensor)
        losses.append(of_shard.to(log_prob.dtype))
    return torch.stack(losses)


def summed(columns: list[Tensor]) -> Tensor:
    """Sums each column ``[k, rows]`` over its rows: ``[k, columns]``."""
    return torch.stack([x.sum(-1) for x in columns], -1)


def loss_and_terms(
    log_prob: Tensor,
    entropy: Tensor,
    values: Tensor | None,
    old_log_prob: Tensor,
    old_values: Tensor | None,
    advantages: Tensor,
    returns: Tensor | None,
    settings: LossSettings,
    valid: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    actor_output: Tensor | None = None,
    sums: Callable[[list[Tensor]], Tensor] = summed,
) -> tuple[Tensor, Tensor]:
    """Computes the loss of PPO (Schulman et al. 2017, eq. 9) or GRPO (Shao et al. 2024, eq. 3), summed over rows.

    All tensors are ``[k, rows]``. Without a loss of the user they may also be ``[rows]``; then the results have no axis
    ``k``. Advantages are normalised already. Values and returns are None without a critic. ``valid`` is 1.0 where a
    sample counts; None if all count. ``reference_log_prob`` is under the policy to which ``settings.kl_coef`` ties this
    one. ``actor_output`` ``[k, rows, outputs]`` is for the user's own loss. ``sums`` does what :func:`summed` does.
    Plain policies on a CPU use :meth:`lockstep.torch_engine.plain.losses.ActionHead.loss` instead, which has its
    gradient by hand: another loss must be added there too.

    Returns:
        The loss ``[k]`` and the terms ``[k, T]`` in the order of ``settings.terms``: sums over rows divided by the
        global count.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    policy = surrogate(ratio, advantages, settings.clip_range)
    if values is None:
        value = torch.zeros_like(policy)
    else:
        assert old_values is not None
        assert returns is not None
        value = value_loss(values, old_values, returns, settings.value_clip_range)
    outside = ((ratio - 1.0).abs() > settings.clip_range).to(ratio.dtype)
    parts = [policy, value, entropy, k3(log_ratio).detach(), outside]
    if settings.kl_coef:
        assert reference_log_prob is not None
        parts.append(k3(reference_log_prob - log_prob))
    if settings.loss is not None:
        named = {"log_prob": log_prob, "old_log_prob": old_log_prob, "entropy": entropy, "value": values}
        named |= {"old_value": old_values, "return_": returns, "advantage": advantages, "actor_output": actor_output}
        parts.append(own_losses(named | {"reference_log_prob": reference_log_prob}, settings))
    if valid is not None:
        parts = [torch.where(valid > 0, part, 0.0) for part in parts]
    terms = sums(parts) / settings.count
    if settings.loss is not None:
        trained = log_prob if values is None else log_prob + values
        if valid is not None:
            trained = torch.where(valid > 0, trained, 0.0)
        untouched = 0.0 * trained.sum(-1)  # gives all parameters a gradient, for which DDP waits
        own = sums(parts[-1:])[..., 0] / settings.count  # no gradient through the other terms
        return own + untouched, terms.detach()
    loss = terms[..., 0] + settings.value_coef * terms[..., 1] - settings.entropy_coef * terms[..., 2]
    if settings.kl_coef:
        loss = loss + settings.kl_coef * terms[..., 5]
    return loss, terms.detach()
