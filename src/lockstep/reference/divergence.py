"""Kullback-Leibler divergence, estimated and exact.

One convention throughout: the divergence is KL(p || q), and where it is estimated, the samples were drawn from p.
For PPO p is the policy that acted (old), q the one being trained (new). Schulman's post writes KL[q, p] with samples
from q: his letters are exchanged here, so that estimators and exact formulas take their arguments in one order.
"""

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64
from lockstep.reference.distributions import log_softmax


def _log_ratio(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> Array:
    """`log r = log q(x) - log p(x)` of samples x drawn from p."""
    log_prob_p, log_prob_q = float64(log_prob_p=log_prob_p, log_prob_q=log_prob_q)
    return log_prob_q - log_prob_p


def kl_k1(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> float:
    """Mean of `-log r`, `r = q(x) / p(x)`, `x ~ p`: unbiased for KL(p || q), high variance, may be negative.

    Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (k1).

    Args:
        log_prob_p: Log-probabilities of the samples under p, from which they were drawn. Any shape.
        log_prob_q: Under q, the same shape.
    """
    return float(np.mean(-_log_ratio(log_prob_p, log_prob_q)))


def kl_k2(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> float:
    """Mean of `(log r)^2 / 2`, `r = q(x) / p(x)`, `x ~ p`: biased for KL(p || q), low variance, never negative.

    Source: Schulman 2020, "Approximating KL Divergence" (k2). Arguments as for `kl_k1`.
    """
    return float(np.mean(0.5 * _log_ratio(log_prob_p, log_prob_q) ** 2))


def kl_k3(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> float:
    """Mean of `(r - 1) - log r`, `r = q(x) / p(x)`, `x ~ p`: unbiased for KL(p || q), low variance, never negative.

    PPO's `approx_kl` is `kl_k3(old_log_prob, new_log_prob)`.

    Source: Schulman 2020, "Approximating KL Divergence" (k3). Arguments as for `kl_k1`.
    """
    log_ratio = _log_ratio(log_prob_p, log_prob_q)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))  # expm1: `exp(x) - 1` loses every digit of a small x


def categorical_kl(logits_p: ArrayLike, logits_q: ArrayLike) -> Array:
    """Exact `KL(p || q) = sum_a p(a) (log p(a) - log q(a))` of two categorical distributions.

    Args:
        logits_p: `[..., num_actions]`, unnormalised; -inf marks an impossible action.
        logits_q: The same shape.

    Returns:
        `[...]`; inf where p allows an action that q doesn't.

    Raises:
        ValueError: If the shapes differ.
    """
    logits_p, logits_q = float64(logits_p=logits_p, logits_q=logits_q)
    log_p, log_q = log_softmax(logits_p), log_softmax(logits_q)
    possible = np.exp(log_p) > 0.0  # 0 log 0 = 0
    difference = np.where(possible, log_p, 0.0) - np.where(possible, log_q, 0.0)
    return np.sum(np.exp(log_p) * difference, axis=-1)


def gaussian_kl(mean_p: ArrayLike, std_p: ArrayLike, mean_q: ArrayLike, std_q: ArrayLike) -> Array:
    """Exact KL(p || q) of two diagonal Gaussians, summed over the last axis.

    `sum_i [ log(std_q / std_p) + (std_p^2 + (mean_p - mean_q)^2) / (2 std_q^2) - 1/2 ]`.

    Args:
        mean_p: `[..., action_dim]`.
        std_p: Positive, broadcast against `mean_p` (a state-independent std is `[action_dim]`).
        mean_q: The shape of `mean_p`.
        std_q: Positive, broadcast against `mean_q`.

    Returns:
        `[...]`.

    Raises:
        ValueError: If the shapes of the means differ.
    """
    mean_p, mean_q = float64(mean_p=mean_p, mean_q=mean_q)
    std_p, std_q = np.asarray(std_p, dtype=np.float64), np.asarray(std_q, dtype=np.float64)
    terms = np.log(std_q / std_p) + (std_p**2 + (mean_p - mean_q) ** 2) / (2.0 * std_q**2) - 0.5
    return np.sum(terms, axis=-1)
