"""Action distributions: categorical and diagonal Gaussian."""

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64

LOG_2PI = float(np.log(2.0 * np.pi))


def log_softmax(logits: Array) -> Array:
    """Returns normalised log-probabilities over the last axis; the maximum is subtracted so that nothing overflows."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def categorical_log_prob(logits: ArrayLike, actions: ArrayLike) -> Array:
    """Returns `log p(a) = logits_a - log sum_b exp(logits_b)`.

    Args:
        logits: `[..., num_actions]`, unnormalised.
        actions: `[...]`, integers in `[0, num_actions)`.

    Returns:
        `[...]`.

    Raises:
        ValueError: If the leading shapes differ or an action is out of range.
    """
    (logits,) = float64(logits=logits)
    actions = np.asarray(actions, dtype=np.int64)
    if actions.shape != logits.shape[:-1]:
        raise ValueError(f"actions have shape {actions.shape}, logits {logits.shape}: expected {logits.shape[:-1]}")
    if actions.size and (actions.min() < 0 or actions.max() >= logits.shape[-1]):
        raise ValueError(f"actions must be in [0, {logits.shape[-1]}), got {actions.min()} to {actions.max()}")
    return np.take_along_axis(log_softmax(logits), actions[..., None], axis=-1)[..., 0]


def categorical_entropy(logits: ArrayLike) -> Array:
    """Returns `H = -sum_a p(a) log p(a)` in nats, with `0 log 0 = 0`, `[..., num_actions]` to `[...]`.

    Logits are unnormalised; -inf marks an impossible action.
    """
    (logits,) = float64(logits=logits)
    log_prob = log_softmax(logits)
    prob = np.exp(log_prob)
    return -np.sum(prob * np.where(prob > 0.0, log_prob, 0.0), axis=-1)


def gaussian_log_prob(mean: ArrayLike, log_std: ArrayLike, actions: ArrayLike) -> Array:
    """Returns the log-density of a diagonal Gaussian, summed over the last axis.

    `sum_i [ -((a_i - mean_i) / std_i)^2 / 2 - log std_i - log(2 pi) / 2 ]`.

    Args:
        mean: `[..., action_dim]`.
        log_std: Broadcast against `mean` (state-independent: `[action_dim]`).
        actions: The shape of `mean`.

    Returns:
        `[...]`.

    Raises:
        ValueError: If the shapes of `mean` and `actions` differ.
    """
    mean, actions = float64(mean=mean, actions=actions)
    log_std = np.asarray(log_std, dtype=np.float64)
    standardised = (actions - mean) / np.exp(log_std)
    return np.sum(-0.5 * standardised**2 - log_std - 0.5 * LOG_2PI, axis=-1)


def gaussian_entropy(log_std: ArrayLike) -> Array:
    """Entropy of a diagonal Gaussian in nats: `sum_i [ 1/2 + log(2 pi) / 2 + log std_i ]`, `[..., dim]` to `[...]`."""
    (log_std,) = float64(log_std=log_std)
    return np.sum(0.5 + 0.5 * LOG_2PI + log_std, axis=-1)
