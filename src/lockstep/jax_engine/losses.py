"""The losses of PPO and GRPO: sums over a shard divided by a global count. :mod:`lockstep.reference` has references."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array, lax
from jax import numpy as jnp

from lockstep.training.losses import LossSample, LossSettings, check_shape


def value_loss(values: Array, old_values: Array, returns: Array, clip_range: float | None) -> Array:
    """Computes half the squared error; with a clip range, half the larger of it and the clipped one.

    The clipping is that of Huang et al. 2022, detail 9.
    """
    error = jnp.square(values - returns)
    if clip_range is not None:
        clipped = old_values + jnp.clip(values - old_values, -clip_range, clip_range)
        error = jnp.maximum(error, jnp.square(clipped - returns))
    return 0.5 * error


def k3(log_ratio: Array) -> Array:
    """Computes the k3 estimator ``exp(x) - 1 - x`` of a KL divergence (Schulman 2020; Shao et al. 2024, eq. 4)."""
    return jnp.expm1(log_ratio) - log_ratio


def surrogate(ratio: Array, advantages: Array, clip_range: float) -> Array:
    """Computes the clipped surrogate objective, negated (Schulman et al. 2017, eq. 7).

    It is the larger of the plain and the clipped one. The clipped one is larger only where it is constant, so it needs
    no gradient.
    """
    plain = -advantages * ratio
    clipped = lax.stop_gradient(-advantages * jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range))
    return jnp.where(clipped > plain, clipped, plain)


def ppo_loss(sample: LossSample) -> Array:
    """Computes the loss of each sample ``[rows]`` that :func:`loss_and_terms` sums if the user gives no other."""
    ratio = jnp.exp(sample.log_prob - sample.old_log_prob)
    loss = surrogate(ratio, sample.advantage, sample.clip_range) - sample.entropy_coef * sample.entropy
    if sample.value is not None:
        value = value_loss(sample.value, sample.old_value, sample.return_, sample.value_clip_range)
        loss = loss + sample.value_coef * value
    if sample.kl_coef:
        loss = loss + sample.kl_coef * k3(sample.reference_log_prob - sample.log_prob)
    return loss


def own_losses(named: Mapping[str, Array | None], settings: LossSettings) -> Array:
    """Computes the user's own loss of each sample ``[rows]``, from arrays ``[rows, …]`` by field name.

    Raises:
        ValueError: if it returns anything but one loss per sample; the message is one line.
    """
    log_prob = named["log_prob"]
    assert settings.loss is not None
    assert log_prob is not None
    losses = settings.loss(settings.sample(ppo_loss, **named))
    check_shape(losses, len(log_prob), Array)
    return losses.astype(log_prob.dtype)


def loss_and_terms(
    log_prob: Array,
    entropy: Array,
    values: Array | None,
    old_log_prob: Array,
    old_values: Array | None,
    advantages: Array,
    returns: Array | None,
    settings: LossSettings,
    valid: Array | None = None,
    reference_log_prob: Array | None = None,
    actor_output: Array | None = None,
) -> tuple[Array, Array]:
    """Computes the loss of PPO (Schulman et al. 2017, eq. 9) or GRPO (Shao et al. 2024, eq. 3), over the last axis.

    All arrays are ``[rows]`` or ``[…, rows]``. Advantages are normalised already. ``old_log_prob`` is under the policy
    that took the actions, ``reference_log_prob`` under the policy to which ``settings.kl_coef`` ties this one. Values
    and returns are None without a critic. ``valid`` is 1.0 where a sample counts; None if all count. ``settings`` holds
    the global count. ``actor_output`` ``[rows, outputs]`` is for the user's own loss.

    Returns:
        The loss ``[]`` and the terms ``[T]`` in the order of ``settings.terms``: sums over rows divided by the global
        count; no gradient flows through the terms.
    """
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    policy = surrogate(ratio, advantages, settings.clip_range)
    if values is None:
        value = jnp.zeros_like(policy)
    else:
        assert old_values is not None
        assert returns is not None
        value = value_loss(values, old_values, returns, settings.value_clip_range)
    outside = (jnp.abs(ratio - 1.0) > settings.clip_range).astype(ratio.dtype)
    parts = [policy, value, entropy, lax.stop_gradient(k3(log_ratio)), outside]
    if settings.kl_coef:
        assert reference_log_prob is not None
        parts.append(k3(reference_log_prob - log_prob))
    if settings.loss is not None:
        named = {"log_prob": log_prob, "old_log_prob": old_log_prob, "entropy": entropy, "value": values}
        named |= {"old_value": old_values, "return_": returns, "advantage": advantages, "actor_output": actor_output}
        parts.append(own_losses(named | {"reference_log_prob": reference_log_prob}, settings))
    if valid is not None:
        parts = [jnp.where(valid > 0, part, 0.0) for part in parts]
    terms = jnp.stack(parts, -2).sum(-1) / settings.count
    if settings.loss is not None:
        return parts[-1].sum(-1) / settings.count, lax.stop_gradient(terms)  # no gradient through the other terms
    loss = terms[..., 0] + settings.value_coef * terms[..., 1] - settings.entropy_coef * terms[..., 2]
    if settings.kl_coef:
        loss = loss + settings.kl_coef * terms[..., 5]
    return loss, lax.stop_gradient(terms)
