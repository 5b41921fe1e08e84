"""Limits of an update, the same in both engines: learning rates, KL divergence, gradient norm, finite numbers."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.config.run import Config
from lockstep.core.errors import NonFiniteError

KL_STOP_FACTOR = 1.5
"""The update ends with a minibatch whose KL divergence is above ``ppo.target_kl`` times this."""
LEARNING_RATE_LIMITS = (1e-5, 1e-2)
"""Between which the adaptive schedule moves."""
LEARNING_RATE_FACTOR = 1.5
CLIP_EPSILON = 1e-6


def scheduled_learning_rate(config: Config, global_step: int, current: float) -> float:
    """Returns the learning rate with which an iteration begins, ``global_step`` environment steps being done.

    The constant and the adaptive schedule keep the ``current`` one.
    """
    if config.ppo.schedule == "linear":
        return config.ppo.learning_rate * max(0.0, 1.0 - global_step / config.total_steps)
    return current


def non_finite(
    iteration: int, where: str, names: Iterable[str], terms: Iterable[float], unseen: str | None = None
) -> NonFiniteError:
    """Makes the error of a loss or gradient that is not finite, in an iteration counted from 1, with the loss terms.

    ``unseen`` is the id of an environment whose numbers weren't looked at before.
    """
    named = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, terms, strict=True))
    perhaps = "" if unseen is None else f"lockstep check {unseen} looks for rewards and observations that are none; "
    return NonFiniteError(
        f"non-finite loss or gradient in iteration {iteration}, {where} ({named}); {perhaps}a smaller "
        "ppo.learning_rate or normalize.observations may help"
    )
