"""Advantages and returns of PPO."""

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    bootstrap_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """Computes advantages by generalised advantage estimation.

    `delta_t = r_t + gamma * V'_t * (1 - terminated_t) - V_t`;
    `A_t = delta_t + gamma * lambda * (1 - (terminated | truncated)_t) * A_{t+1}`, with `A_T = 0`.

    A terminated step bootstraps from 0, a truncated one from the value of its final observation; both end the sum. All
    arrays are `[T, E]`; `bootstrap_values`, V', are ignored where the episode terminated.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.

    Returns:
        `(advantages, returns)`, both `[T, E]`; returns are `advantages + values`.

    Raises:
        ValueError: If the shapes differ.
    """
    rewards, values, bootstrap_values, ends, cuts = float64(
        rewards=rewards, values=values, bootstrap_values=bootstrap_values, terminated=terminated, truncated=truncated
    )
    is_terminated, is_done = ends != 0, (ends != 0) | (cuts != 0)
    deltas = rewards + gamma * np.where(is_terminated, 0.0, bootstrap_values) - values
    advantages = np.zeros_like(deltas)
    following = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        following = deltas[t] + gamma * gae_lambda * np.where(is_done[t], 0.0, following)
        advantages[t] = following
    return advantages, advantages + values


def discounted_returns(rewards: ArrayLike, dones: ArrayLike, initial: ArrayLike, gamma: float) -> tuple[Array, Array]:
    """Computes the running discounted return of each environment, whose variance scales rewards.

    `R_t = gamma * R_{t-1} + r_t`. After a done step (terminated or truncated) R is reset to 0; the value at the done
    step itself is recorded before the reset. Passing `final` as the next call's `initial` continues without a seam.

    Source: Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 3 (reward scaling).

    Returns:
        `(running, final)`: R at every step, `[T, E]`, and R after the last step and its reset, `[E]`.

    Raises:
        ValueError: If the shapes differ.
    """
    rewards, dones = float64(rewards=rewards, dones=dones)
    (current,) = float64(initial=initial)
    if current.shape != rewards.shape[1:]:
        raise ValueError(f"initial has shape {current.shape}, rewards {rewards.shape}: expected {rewards.shape[1:]}")
    running = np.zeros_like(rewards)
    for t in range(len(rewards)):
        running[t] = gamma * current + rewards[t]
        current = np.where(dones[t] != 0, 0.0, running[t])
    return running, current


def explained_variance(values: ArrayLike, returns: ArrayLike) -> float:
    """Returns the share of the returns' variance that the values explain: `1 - Var(returns - values) / Var(returns)`.

    1 is perfect up to a constant, 0 no better than a constant, negative worse than a constant, nan where all returns
    are equal (their variance is 0).

    Raises:
        ValueError: If the shapes differ.
    """
    values, returns = float64(values=values, returns=returns)
    if returns.max() == returns.min():  # exact, where the computed variance of equal numbers may be a rounding error
        return float("nan")
    return float(1.0 - np.var(returns - values) / np.var(returns))
