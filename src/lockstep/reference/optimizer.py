"""The optimiser step: clipping, Adam, the adaptive learning rate."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lockstep.reference.arrays import Array, float64


def clip_by_global_norm(grads: Sequence[ArrayLike], max_norm: float) -> tuple[list[Array], float]:
    """Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, `norm` being the L2 norm of all of them together.

    The form of `torch.nn.utils.clip_grad_norm_`, 1e-6 included: a gradient whose norm is exactly `max_norm` shrinks by
    about 1e-6 of its size. A nan in any gradient makes all of them nan.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.

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
    """Takes step number `step` of Adam, counted from 1, on arrays of one shape.

    `m = beta1 * m + (1 - beta1) * g`; `v = beta2 * v + (1 - beta2) * g^2`;
    `params -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)`.

    Source: Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1, with eps as in
    `torch.optim.Adam` (added to the bias-corrected root).

    Returns:
        `(params, exp_avg, exp_avg_sq)`, with m and v in the names of PyTorch, as new arrays.

    Raises:
        ValueError: If the shapes differ or `step` is less than 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}: the first step is number 1 (the bias correction divides by 1 - beta^step)")
    params, grad, exp_avg, exp_avg_sq = float64(params=params, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad**2
    denominator = np.sqrt(exp_avg_sq) / np.sqrt(1.0 - beta2**step) + eps
    return params - lr / (1.0 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


def adaptive_learning_rate(
    lr: float, kl: float, desired_kl: float, low: float = 1e-5, high: float = 1e-2, noise: float = 1e-6
) -> float:
    """Adapts the learning rate to an observed KL divergence.

    `kl > 2 * desired_kl`: `max(low, lr / 1.5)`; `noise * desired_kl < kl < desired_kl / 2`: `min(high, lr * 1.5)`;
    otherwise `lr`. A KL of `noise * desired_kl` or less is rounding, before anything was learnt, and changes nothing.

    Source: rsl_rl, `PPO.update` with `schedule="adaptive"`, where `noise` is 0; no paper gives these constants.
    """
    if kl > 2.0 * desired_kl:
        return max(low, lr / 1.5)
    if noise * desired_kl < kl < desired_kl / 2.0:
        return min(high, lr * 1.5)
    return lr
