"""The mathematics both engines are held to, written once in float64 NumPy.

Nothing here is fast and nothing here is used in training: every function is the formula of its source, spelt so that
it can be checked against the paper line by line. The engines' own versions are compared with these in the tests.

Arrays are time-major, `[num_steps, num_envs, ...]`. Inputs of any real dtype are converted to float64 first. Shapes
that a formula expects to agree must agree exactly: nothing is broadcast across samples, because a silent broadcast of
`[N, 1]` against `[N]` is the classic way for such a formula to be wrong.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LOG_2PI = float(np.log(2.0 * np.pi))


def _float64(**arrays: ArrayLike) -> list[Array]:
    """Convert to float64 and insist on one common shape (keyword names appear in the error)."""
    converted = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}
    if len({array.shape for array in converted.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in converted.items())
        raise ValueError(f"arrays must have the same shape, got {shapes}")
    return list(converted.values())


# --- Advantages and returns -------------------------------------------------------------------------------------------


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """Generalised advantage estimation.

    `delta_t = r_t + gamma * V'_t * (1 - terminated_t) - V_t`;
    `A_t = delta_t + gamma * lambda * (1 - (terminated | truncated)_t) * A_{t+1}`, with `A_T = 0`.

    A terminated step bootstraps from 0, a truncated one from the value of its final observation; both end the sum.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.

    Args:
        rewards: `[T, E]`.
        values: `[T, E]`, V of the state in which step t was taken.
        next_values: `[T, E]`, V of the state that follows step t: V(final_obs) where the episode was truncated.
            Ignored, whatever it holds, where the episode terminated.
        terminated: `[T, E]` bool.
        truncated: `[T, E]` bool.
        gamma: Discount factor.
        gae_lambda: Exponential weight of the k-step estimators.

    Returns:
        `(advantages, returns)`, both `[T, E]`; returns are `advantages + values`.

    Raises:
        ValueError: If the shapes differ.
    """
    rewards, values, next_values, ends, cuts = _float64(
        rewards=rewards, values=values, next_values=next_values, terminated=terminated, truncated=truncated
    )
    is_terminated, is_done = ends != 0, (ends != 0) | (cuts != 0)
    deltas = rewards + gamma * np.where(is_terminated, 0.0, next_values) - values
    advantages = np.zeros_like(deltas)
    following = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        following = deltas[t] + gamma * gae_lambda * np.where(is_done[t], 0.0, following)
        advantages[t] = following
    return advantages, advantages + values


def group_advantages(returns: ArrayLike, group_size: int, eps: float) -> Array:
    """Group-relative advantages of GRPO: `A_i = (R_i - mean_g) / (std_g + eps)`.

    `std_g` is the population standard deviation (divided by `group_size`), as everywhere in this package; the paper
    leaves the choice open. A group whose returns are all equal has advantages 0 (up to rounding).

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1 (outcome supervision).

    Args:
        returns: `[num_groups * group_size]`; group g is the g-th run of `group_size` consecutive entries.
        group_size: Members of a group.
        eps: Added to the standard deviation.

    Returns:
        Advantages, `[num_groups * group_size]`.

    Raises:
        ValueError: If `returns` isn't one-dimensional or `group_size` doesn't divide its length.
    """
    (returns,) = _float64(returns=returns)
    if returns.ndim != 1 or group_size < 1 or returns.size % group_size:
        raise ValueError(f"returns of shape {returns.shape} can't be cut into groups of {group_size}")
    groups = returns.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + eps)).reshape(-1)


def discounted_returns(rewards: ArrayLike, dones: ArrayLike, initial: ArrayLike, gamma: float) -> tuple[Array, Array]:
    """Forward-running discounted return of each environment, whose variance scales rewards.

    `R_t = gamma * R_{t-1} + r_t`. After a done step R is reset to 0; the value at the done step itself is recorded
    before the reset. Passing `final` as the next call's `initial` continues the sequence without a seam.

    Source: Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 3 (reward scaling).

    Args:
        rewards: `[T, E]`.
        dones: `[T, E]` bool, terminated or truncated.
        initial: `[E]`, R before the first step (0 at the start of a run).
        gamma: Discount factor.

    Returns:
        `(running, final)`: R at every step, `[T, E]`, and R after the last step and its reset, `[E]`.

    Raises:
        ValueError: If the shapes differ.
    """
    rewards, dones = _float64(rewards=rewards, dones=dones)
    (current,) = _float64(initial=initial)
    if current.shape != rewards.shape[1:]:
        raise ValueError(f"initial has shape {current.shape}, rewards {rewards.shape}: expected {rewards.shape[1:]}")
    running = np.zeros_like(rewards)
    for t in range(len(rewards)):
        running[t] = gamma * current + rewards[t]
        current = np.where(dones[t] != 0, 0.0, running[t])
    return running, current


def explained_variance(values: ArrayLike, returns: ArrayLike) -> float:
    """Share of the returns' variance that the values explain: `1 - Var(returns - values) / Var(returns)`.

    1 is perfect up to a constant, 0 no better than a constant, negative worse than a constant.

    Args:
        values: Any shape.
        returns: The same shape.

    Returns:
        The share, or nan when all returns are equal (their variance is 0).

    Raises:
        ValueError: If the shapes differ.
    """
    values, returns = _float64(values=values, returns=returns)
    if returns.max() == returns.min():  # exact, where the computed variance of equal numbers may be a rounding error
        return float("nan")
    return float(1.0 - np.var(returns - values) / np.var(returns))


# --- PPO loss ---------------------------------------------------------------------------------------------------------


def _policy_terms(ratio: Array, advantages: Array, clip_range: float) -> Array:
    """Per-sample clipped surrogate, negated: `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`."""
    clipped = np.clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return np.maximum(-advantages * ratio, -advantages * clipped)


def _value_terms(new_values: Array, old_values: Array, returns: Array, value_clip_range: float | None) -> Array:
    """Per-sample value loss: half the squared error, or the worse of that and the clipped value's."""
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
    """PPO's clipped loss and its diagnostics, each a sum over the samples given divided by `count`.

    With `ratio = exp(new_log_prob - old_log_prob)`, per sample:
    policy `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`; value `0.5 * (V - R)^2`, or, with value clipping,
    `0.5 * max((V - R)^2, (V_old + clip(V - V_old, -vclip, vclip) - R)^2)`;
    `loss = policy_loss + value_coef * value_loss - entropy_coef * entropy`;
    `approx_kl` is k3 of KL(old || new), `(ratio - 1) - log ratio`; `clip_fraction` counts `|ratio - 1| > eps`.

    Because `count` is the global count, the results of any partition of the minibatch add up to the whole's.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7 and eq. 9 (negated: a loss);
    value clipping: Engstrom et al. 2020, section 3; approx_kl: see `kl_k3`.

    Args:
        new_log_prob: `[N]` (any shape, shared by all arrays), under the policy being trained.
        old_log_prob: Under the policy that acted.
        advantages: Already normalised, if they are to be.
        new_values: Of the value function being trained.
        old_values: Of the value function that was used in the rollout. Unused without value clipping.
        returns: Targets of the value function.
        entropy: Of the policy being trained, per sample.
        clip_range: eps.
        value_clip_range: vclip, or None for no value clipping.
        entropy_coef: Weight of the entropy bonus.
        value_coef: Weight of the value loss.
        count: Samples in the global minibatch, not in these arrays.

    Returns:
        `policy_loss`, `value_loss`, `entropy`, `loss`, `approx_kl`, `clip_fraction`.

    Raises:
        ValueError: If the shapes differ or `count` isn't positive.
    """
    if count < 1:
        raise ValueError(f"count is {count}: it must be the positive number of samples in the global minibatch")
    new_log_prob, old_log_prob, advantages, new_values, old_values, returns, entropy = _float64(
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
        "policy_loss": _policy_terms(ratio, advantages, clip_range).sum(),
        "value_loss": _value_terms(new_values, old_values, returns, value_clip_range).sum(),
        "entropy": entropy.sum(),
        "approx_kl": (np.expm1(log_ratio) - log_ratio).sum(),
        "clip_fraction": (np.abs(ratio - 1.0) > clip_range).sum(),
    }
    means = {name: float(total / count) for name, total in sums.items()}
    loss = means["policy_loss"] + value_coef * means["value_loss"] - entropy_coef * means["entropy"]
    return {**means, "loss": loss}


# --- KL divergence ----------------------------------------------------------------------------------------------------
#
# One convention throughout: the divergence is KL(p || q), and where it is estimated, the samples were drawn from p.
# For PPO p is the policy that acted (old), q the one being trained (new). Schulman's post writes KL[q, p] with samples
# from q: his letters are exchanged here, so that estimators and exact formulas take their arguments in one order.


def _log_ratio(log_prob_p: ArrayLike, log_prob_q: ArrayLike) -> Array:
    """`log r = log q(x) - log p(x)` of samples x drawn from p."""
    log_prob_p, log_prob_q = _float64(log_prob_p=log_prob_p, log_prob_q=log_prob_q)
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
    logits_p, logits_q = _float64(logits_p=logits_p, logits_q=logits_q)
    log_p, log_q = _log_softmax(logits_p), _log_softmax(logits_q)
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
    mean_p, mean_q = _float64(mean_p=mean_p, mean_q=mean_q)
    std_p, std_q = np.asarray(std_p, dtype=np.float64), np.asarray(std_q, dtype=np.float64)
    terms = np.log(std_q / std_p) + (std_p**2 + (mean_p - mean_q) ** 2) / (2.0 * std_q**2) - 0.5
    return np.sum(terms, axis=-1)


# --- Action distributions ---------------------------------------------------------------------------------------------


def _log_softmax(logits: Array) -> Array:
    """Normalised log-probabilities over the last axis; the maximum is taken out so that no exponential overflows."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def categorical_log_prob(logits: ArrayLike, actions: ArrayLike) -> Array:
    """`log p(a) = logits_a - log sum_b exp(logits_b)`.

    Args:
        logits: `[..., num_actions]`, unnormalised.
        actions: `[...]`, integers in `[0, num_actions)`.

    Returns:
        `[...]`.

    Raises:
        ValueError: If the leading shapes differ or an action is out of range.
    """
    (logits,) = _float64(logits=logits)
    actions = np.asarray(actions, dtype=np.int64)
    if actions.shape != logits.shape[:-1]:
        raise ValueError(f"actions have shape {actions.shape}, logits {logits.shape}: expected {logits.shape[:-1]}")
    if actions.size and (actions.min() < 0 or actions.max() >= logits.shape[-1]):
        raise ValueError(f"actions must be in [0, {logits.shape[-1]}), got {actions.min()} to {actions.max()}")
    return np.take_along_axis(_log_softmax(logits), actions[..., None], axis=-1)[..., 0]


def categorical_entropy(logits: ArrayLike) -> Array:
    """`H = -sum_a p(a) log p(a)` in nats, with `0 log 0 = 0`.

    Args:
        logits: `[..., num_actions]`, unnormalised; -inf marks an impossible action.

    Returns:
        `[...]`.
    """
    (logits,) = _float64(logits=logits)
    log_prob = _log_softmax(logits)
    prob = np.exp(log_prob)
    return -np.sum(prob * np.where(prob > 0.0, log_prob, 0.0), axis=-1)


def gaussian_log_prob(mean: ArrayLike, log_std: ArrayLike, actions: ArrayLike) -> Array:
    """Log-density of a diagonal Gaussian, summed over the last axis.

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
    mean, actions = _float64(mean=mean, actions=actions)
    log_std = np.asarray(log_std, dtype=np.float64)
    standardised = (actions - mean) / np.exp(log_std)
    return np.sum(-0.5 * standardised**2 - log_std - 0.5 * LOG_2PI, axis=-1)


def gaussian_entropy(log_std: ArrayLike) -> Array:
    """Entropy of a diagonal Gaussian in nats: `sum_i [ 1/2 + log(2 pi) / 2 + log std_i ]`.

    Args:
        log_std: `[..., action_dim]`.

    Returns:
        `[...]`.
    """
    (log_std,) = _float64(log_std=log_std)
    return np.sum(0.5 + 0.5 * LOG_2PI + log_std, axis=-1)


# --- Moments ----------------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations from the mean (`m2`) of a set of samples, per element."""

    count: int
    mean: Array
    m2: Array


def moments(x: ArrayLike) -> Moments:
    """Count, mean and m2 over axis 0, in two passes.

    Args:
        x: `[N, ...]`. N may be 0: mean and m2 are then 0, the neutral element of `merge_moments`.

    Returns:
        `(count, mean, m2)` with `count = N` and `mean`, `m2` of shape `[...]`.
    """
    (x,) = _float64(x=x)
    if len(x) == 0:
        return Moments(0, np.zeros(x.shape[1:]), np.zeros(x.shape[1:]))
    mean = x.mean(axis=0)
    return Moments(len(x), mean, np.sum((x - mean) ** 2, axis=0))


def merge_moments(a: tuple[int, ArrayLike, ArrayLike], b: tuple[int, ArrayLike, ArrayLike]) -> Moments:
    """Moments of the union of two disjoint sets of samples.

    With `delta = mean_b - mean_a` and `n = n_a + n_b`:
    `mean = mean_a + delta * n_b / n`, `m2 = m2_a + m2_b + delta^2 * n_a * n_b / n`.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", the pairwise update.

    Args:
        a: `(count, mean, m2)`.
        b: `(count, mean, m2)`, of the same shapes.

    Raises:
        ValueError: If the shapes differ.
    """
    mean_a, m2_a, mean_b, m2_b = _float64(mean_a=a[1], m2_a=a[2], mean_b=b[1], m2_b=b[2])
    count = a[0] + b[0]
    if count == 0:
        return Moments(0, mean_a, m2_a)
    delta = mean_b - mean_a
    mean = mean_a + delta * (b[0] / count)
    m2 = m2_a + m2_b + delta**2 * (a[0] * b[0] / count)
    return Moments(count, mean, m2)


def merge_all(parts: Sequence[tuple[int, ArrayLike, ArrayLike]]) -> Moments:
    """Moments of the union of `parts`, merged from first to last: `((p_0 + p_1) + p_2) + ...`.

    Args:
        parts: At least one `(count, mean, m2)`, in shard order.

    Raises:
        ValueError: If `parts` is empty or the shapes differ.
    """
    if not parts:
        raise ValueError("no moments to merge: give at least one (count, mean, m2)")
    count, mean, m2 = parts[0]
    merged = Moments(count, *_float64(mean=mean, m2=m2))
    for part in parts[1:]:
        merged = merge_moments(merged, part)
    return merged


def normalize_advantages(advantages: ArrayLike, mean: float, m2: float, count: int, eps: float = 1e-8) -> Array:
    """`(A - mean) / (std + eps)` with `std = sqrt(m2 / count)`.

    `std` is the population standard deviation: `count` in the denominator, where `torch.std` has `count - 1` by
    default. The statistics are those of the whole global minibatch; `advantages` may be any part of it.

    Args:
        advantages: Any shape.
        mean: Mean of the global minibatch.
        m2: Its sum of squared deviations.
        count: Its number of samples.
        eps: Added to the standard deviation.

    Returns:
        The shape of `advantages`.

    Raises:
        ValueError: If `count` isn't positive.
    """
    if count < 1:
        raise ValueError(f"count is {count}: a mean and a variance need at least one sample")
    (advantages,) = _float64(advantages=advantages)
    return (advantages - mean) / (np.sqrt(m2 / count) + eps)


# --- Optimiser step ---------------------------------------------------------------------------------------------------


def clip_by_global_norm(grads: Sequence[ArrayLike], max_norm: float) -> tuple[list[Array], float]:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, `norm` being that of all of them together.

    The form of `torch.nn.utils.clip_grad_norm_`, 1e-6 included: a gradient whose norm is exactly `max_norm` shrinks by
    about 1e-6 of its size. A nan in any gradient makes all of them nan.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.

    Args:
        grads: Arrays of any shapes.
        max_norm: Largest allowed L2 norm.

    Returns:
        `(clipped, norm)`: new arrays, and the norm before clipping.
    """
    arrays = [np.asarray(grad, dtype=np.float64) for grad in grads]
    norm = np.sqrt(np.sum([np.sum(array**2) for array in arrays]))
    coefficient = np.minimum(1.0, max_norm / (norm + 1e-6))
    return [array * coefficient for array in arrays], float(norm)


def adam_step(
    params: ArrayLike,
    grad: ArrayLike,
    exp_avg: ArrayLike,
    exp_avg_sq: ArrayLike,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """One step of Adam.

    `m = beta1 * m + (1 - beta1) * g`; `v = beta2 * v + (1 - beta2) * g^2`;
    `params -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)`.

    Source: Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1, with eps as in
    `torch.optim.Adam` (added to the bias-corrected root).

    Args:
        params: Any shape.
        grad: The same shape.
        exp_avg: m before this step, the same shape.
        exp_avg_sq: v before this step, the same shape.
        step: Number of this step, from 1.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the denominator.

    Returns:
        `(params, exp_avg, exp_avg_sq)` after the step, as new arrays.

    Raises:
        ValueError: If the shapes differ or `step` is less than 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}: the first step is number 1 (the bias correction divides by 1 - beta^step)")
    params, grad, exp_avg, exp_avg_sq = _float64(params=params, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad**2
    denominator = np.sqrt(exp_avg_sq) / np.sqrt(1.0 - beta2**step) + eps
    return params - lr / (1.0 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


def adaptive_learning_rate(lr: float, kl: float, desired_kl: float, low: float = 1e-5, high: float = 1e-2) -> float:
    """The learning rate that follows an observed KL divergence.

    `kl > 2 * desired_kl`: `max(low, lr / 1.5)`; `0 < kl < desired_kl / 2`: `min(high, lr * 1.5)`; otherwise `lr`.
    A KL of exactly 0 (nothing was learnt, or nothing was measured) changes nothing.

    Source: rsl_rl, `PPO.update` with `schedule="adaptive"`; no paper gives these constants.

    Args:
        lr: Current learning rate.
        kl: Mean KL of the global minibatch.
        desired_kl: Target.
        low: Lower limit, applied when the rate falls.
        high: Upper limit, applied when the rate rises.
    """
    if kl > 2.0 * desired_kl:
        return max(low, lr / 1.5)
    if 0.0 < kl < desired_kl / 2.0:
        return min(high, lr * 1.5)
    return lr
