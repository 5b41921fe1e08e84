"""PPO's loss."""

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64


def kl_k3(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> float:
    """Returns the mean of `(r - 1) - log r`, `r = q(x) / p(x)`, `x ~ p`: unbiased for KL(p || q), never negative.

    For PPO p is the policy that acted (old), q the one being trained (new).

    Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (k3, with his letters
    exchanged: samples are drawn from p here).
    """
    log_prob_p, log_prob_q = float64(log_prob_p=log_prob_p, log_prob_q=log_prob_q)
    log_ratio = log_prob_q - log_prob_p
    return float(np.mean(np.expm1(log_ratio) - log_ratio))  # expm1: `exp(x) - 1` loses every digit of a small x


def policy_terms(ratio: Array, advantages: Array, clip_range: float) -> Array:
    """Returns the clipped surrogate per sample, negated: `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`."""
    clipped = np.clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return np.maximum(-advantages * ratio, -advantages * clipped)


def _value_terms(new_values: Array, old_values: Array, returns: Array, value_clip_range: float | None) -> Array:
    """Returns the value loss per sample: half the squared error, or half the larger of that and the clipped value's."""
    squared_error = (new_values - returns) ** 2
    if value_clip_range is None:
        return 0.5 * squared_error
    clipped = old_values + np.clip(new_values - old_values, -value_clip_range, value_clip_range)
    return 0.5 * np.maximum(squared_error, (clipped - returns) ** 2)


def ppo_loss(
    new_log_prob: ArrayLike,
    old_log_prob: ArrayLike,
    advantages: ArrayLike,
    new_values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    entropy: ArrayLike,
    *,
    clip_range: float,
    value_clip_range: float | None,
    entropy_coef: float,
    value_coef: float,
    count: int,
) -> dict[str, float]:
    """Computes PPO's clipped loss and its diagnostics, each a sum over the samples given divided by `count`.

    With `ratio = exp(new_log_prob - old_log_prob)`, per sample:
    policy `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`; value `0.5 * (V - R)^2`, or, with value clipping,
    `0.5 * max((V - R)^2, (V_old + clip(V - V_old, -vclip, vclip) - R)^2)`;
    `loss = policy_loss + value_coef * value_loss - entropy_coef * entropy`;
    `approx_kl` is k3 of KL(old || new), `(ratio - 1) - log ratio`; `clip_fraction` counts `|ratio - 1| > eps`.

    Because `count` is the global count, the results of any partition of the minibatch add up to the whole's. All arrays
    have one shape, `[N]` or any other; "old" are the policy and the values of the rollout, "new" those being trained;
    advantages are already normalised, if normalisation is used.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7 and eq. 9 (negated: a loss);
    value clipping: Engstrom et al. 2020, section 3; approx_kl: see `kl_k3`.

    Returns:
        `policy_loss`, `value_loss`, `entropy`, `loss`, `approx_kl`, `clip_fraction`.

    Raises:
        ValueError: If the shapes differ or `count` isn't positive.
    """
    if count < 1:
        raise ValueError(f"count is {count}: it must be the positive number of samples in the global minibatch")
    new_log_prob, old_log_prob, advantages, new_values, old_values, returns, entropy = float64(
        new_log_prob=new_log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        new_values=new_values,
        old_values=old_values,
        returns=returns,
        entropy=entropy,
    )
    log_ratio = new_log_prob - old_log_prob
    ratio = np.exp(log_ratio)
    sums = {
        "policy_loss": policy_terms(ratio, advantages, clip_range).sum(),
        "value_loss": _value_terms(new_values, old_values, returns, value_clip_range).sum(),
        "entropy": entropy.sum(),
        "approx_kl": (np.expm1(log_ratio) - log_ratio).sum(),
        "clip_fraction": (np.abs(ratio - 1.0) > clip_range).sum(),
    }
    means = {name: float(total / count) for name, total in sums.items()}
    loss = means["policy_loss"] + value_coef * means["value_loss"] - entropy_coef * means["entropy"]
    return {**means, "loss": loss}
