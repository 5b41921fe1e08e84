"""The mathematics that both engines are tested against, written once in float64 NumPy.

Nothing here is fast or used in training: every function is the formula of its source, written so that it can be
checked against the paper line by line. The tests compare the engines' own versions with these.

Arrays are time-major, `[num_steps, num_envs, ...]`. Inputs of any real dtype are converted to float64 first. Shapes
that a formula expects to agree must agree exactly: nothing is broadcast across samples, because a silent broadcast of
`[N, 1]` against `[N]` is the classic way for such a formula to be wrong.
"""

from lockstep.reference.advantages import discounted_returns, explained_variance, gae
from lockstep.reference.arrays import Array
from lockstep.reference.distributions import (
    LOG_2PI,
    categorical_entropy,
    categorical_log_prob,
    gaussian_entropy,
    gaussian_log_prob,
)
from lockstep.reference.grpo import group_advantages, grpo_loss
from lockstep.reference.normalizers import Moments, merge_all, merge_moments, moments, normalize_advantages
from lockstep.reference.optimizer import adam_step, adaptive_learning_rate, clip_by_global_norm
from lockstep.reference.ppo import kl_k3, ppo_loss

__all__ = [
    "LOG_2PI",
    "Array",
    "Moments",
    "adam_step",
    "adaptive_learning_rate",
    "categorical_entropy",
    "categorical_log_prob",
    "clip_by_global_norm",
    "discounted_returns",
    "explained_variance",
    "gae",
    "gaussian_entropy",
    "gaussian_log_prob",
    "group_advantages",
    "grpo_loss",
    "kl_k3",
    "merge_all",
    "merge_moments",
    "moments",
    "normalize_advantages",
    "ppo_loss",
]
