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
    """Returns the learning rate with which an iteration begins.

    Args:
        config: the run's.
        global_step: environment steps done before it.
        current: what the adaptive schedule left; the constant one keeps it too.
    """
    if config.ppo.schedule == "linear":
        return config.ppo.learning_rate * max(0.0, 1.0 - global_step / config.total_steps)
    return current


def non_finite(iteration: int, where: str, names: Iterable[str], terms: Iterable[float]) -> NonFiniteError:
    """Makes the error of a loss or gradient that is not finite.

    Args:
        iteration: counted from 1.
        where: epoch and minibatch.
        names: of the loss terms.
        terms: of the minibatch, by which the user sees what broke.
    """
    named = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, terms, strict=True))
    return NonFiniteError(
        f"non-finite loss or gradient in iteration {iteration}, {where} ({named}); a smaller "
        "ppo.learning_rate or normalize.observations may help"
    )
