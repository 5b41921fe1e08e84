"""GRPO: advantages relative to a group that started from the same state, and the loss of the valid steps.

A group is `group_size` environments with consecutive ids that start a collection from the same seeded state. A
collection is one episode of each environment: steps after its first end are masked. The members' returns replace the
critic.

Source: Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
section 4.1, eq. 3 and 4. An action of a step here is what a token is there.
"""

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64
from lockstep.reference.ppo import policy_terms


def group_advantages(returns: ArrayLike, group_size: int, eps: float, scale: bool = True) -> Array:
    """Returns GRPO's group-relative advantages: `A_i = (R_i - mean_g) / (std_g + eps)`, `[num_groups * group_size]`.

    Group g is the g-th run of `group_size` consecutive returns. `std_g` is the population standard deviation, as
    everywhere in this package; the paper leaves the choice open. A group whose returns are all equal has advantages 0
    (up to rounding).

    Without `scale`, `A_i = R_i - mean_g`: dividing by the standard deviation gives groups of nearly equal returns a
    larger weight.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision); without `scale`: Liu et al. 2025,
    "Understanding R1-Zero-Like Training: A Critical Perspective" (Dr. GRPO), section 3.2.

    Raises:
        ValueError: If `returns` isn't one-dimensional or `group_size` doesn't divide its length.
    """
    (returns,) = float64(returns=returns)
    if returns.ndim != 1 or group_size < 1 or returns.size % group_size:
        raise ValueError(f"returns of shape {returns.shape} can't be cut into groups of {group_size}")
    groups = returns.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        centred = centred / (groups.std(axis=1, keepdims=True) + eps)
    return centred.reshape(-1)


def grpo_loss(
    new_log_prob: ArrayLike,
    old_log_prob: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    entropy: ArrayLike,
    *,
    clip_range: float,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    reference_log_prob: ArrayLike | None = None,
    count: int,
) -> dict[str, float]:
    """Computes GRPO's clipped loss and its diagnostics, each a sum over the valid steps given divided by `count`.

    With `ratio = exp(new_log_prob - old_log_prob)`, per valid step:
    policy `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))` (eq. 3, negated: a loss);
    `reference_kl` `exp(ref - new) - (ref - new) - 1` (eq. 4: k3 of KL(new || ref), as if `new` had acted);
    `loss = policy_loss + kl_coef * reference_kl - entropy_coef * entropy`;
    `approx_kl` and `clip_fraction` as in `ppo_loss`.

    Eq. 3 divides each output by its own length and then by the group's size, so that a step of a long episode weighs
    less. Here every valid step weighs the same: the sum is divided by their number in the global minibatch, on all
    ranks together. A rank's own number would give steps a larger weight on ranks with short episodes. Because `count`
    is the global count, the results of any partition of the minibatch add up to the whole's.

    Source: Shao et al. 2024, "DeepSeekMath", eq. 3 and 4; the division: Yu et al. 2025, "DAPO: An Open-Source LLM
    Reinforcement Learning System at Scale", section 3.3.

    All arrays have one shape, `[N]` or any other; where `mask` is False they may hold anything, even nan. `kl_coef` is
    the paper's beta; unless it is 0, the reference policy's log-probabilities are needed. The paper has no entropy
    bonus.

    Returns:
        `policy_loss`, `reference_kl` (0 without a reference policy), `entropy`, `loss`, `approx_kl`, `clip_fraction`.

    Raises:
        ValueError: If the shapes differ, `count` isn't positive or is less than the number of valid steps given, or
            `kl_coef` isn't 0 and there is no reference policy.
    """
    if reference_log_prob is None and kl_coef:
        raise ValueError(f"kl_coef is {kl_coef}, but there is no reference_log_prob: give it, or kl_coef 0")
    new_log_prob, old_log_prob, advantages, valid, entropy, reference = float64(
        new_log_prob=new_log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        mask=mask,
        entropy=entropy,
        reference_log_prob=new_log_prob if reference_log_prob is None else reference_log_prob,
    )
    chosen = valid != 0
    if count < max(1, chosen.sum()):
        raise ValueError(
            f"count is {count}: it must be the number of valid steps in the global minibatch; here are {chosen.sum()}"
        )
    new, old, advantages = new_log_prob[chosen], old_log_prob[chosen], advantages[chosen]
    ratio, away = np.exp(new - old), reference[chosen] - new
    sums = {
        "policy_loss": policy_terms(ratio, advantages, clip_range).sum(),
        "reference_kl": (np.expm1(away) - away).sum(),
        "entropy": entropy[chosen].sum(),
        "approx_kl": (np.expm1(new - old) - (new - old)).sum(),
        "clip_fraction": (np.abs(ratio - 1.0) > clip_range).sum(),
    }
    means = {name: float(total / count) for name, total in sums.items()}
    loss = means["policy_loss"] + kl_coef * means["reference_kl"] - entropy_coef * means["entropy"]
    return {**means, "loss": loss}
