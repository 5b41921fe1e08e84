"""Limits of an update, the same in both engines: learning rates, KL divergence, gradient norm, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lockstep.config.run import Config
from lockstep.core.errors import NonFiniteError

KL_STOP_FACTOR = 1.5
"""The update ends with a minibatch whose KL divergence is above ``ppo.target_kl`` times this."""
KL_NOISE = 1e-6
"""The share of ``ppo.desired_kl`` up to which a KL divergence is taken for rounding, and measures nothing.

At an update's first minibatch the policy is the one that acted: what its KL differs from 0 is rounding alone.
"""
LEARNING_RATE_LIMITS = (1e-5, 1e-2)
"""Between which the adaptive schedule moves."""
LEARNING_RATE_FACTOR = 1.5
LARGE_KL, SMALL_KL = 2.0, 0.5
"""Times ``ppo.desired_kl``: above the first the adaptive schedule lowers the rate, below the second it raises it."""
CLIP_EPSILON = 1e-6
ADVANTAGE_EPSILON = 1e-8
"""Added to the deviation that advantages of a minibatch are divided by."""
GROUP_EPSILON = 1e-8
"""Added to the deviation that returns of a group are divided by."""


def scheduled_learning_rate(config: Config, global_step: int, current: float) -> float:
    """Returns the learning rate with which an iteration begins, ``global_step`` environment steps being done.

    The constant and the adaptive schedule keep the ``current`` one.
    """
    if config.ppo.schedule == "linear":
        return config.ppo.learning_rate * remaining(config, global_step)
    return current


def remaining(config: Config, global_step: int) -> float:
    """Returns the share of a run that is left after ``global_step`` steps, by which linear schedules fall to 0."""
    return max(0.0, 1.0 - global_step / config.total_steps)


def follows_length(config: Config) -> bool:
    """Tells whether a schedule falls to 0 over ``total_steps``, so that a longer run is another one from its start."""
    return "linear" in (config.ppo.schedule, config.ppo.entropy_schedule, config.ppo.clip_schedule)


def scheduled_coefficients(config: Config, global_step: int) -> dict[str, float]:
    """Returns the loss's coefficients with which an iteration begins, by name; those alone that have a schedule.

    Values are clipped by the schedule of ``clip_range``, as in the Atari experiments of Schulman et al. (2017, table 5)
    and in OpenAI Baselines' PPO2.
    """
    ppo, left = config.ppo, remaining(config, global_step)
    out: dict[str, float] = {}
    if ppo.entropy_schedule == "linear":
        out["entropy_coef"] = ppo.entropy_coef * left
    if ppo.clip_schedule == "linear":
        out["clip_range"] = ppo.clip_range * left
        if ppo.value_clip_range is not None:
            out["value_clip_range"] = ppo.value_clip_range * left
    return out


def non_finite(
    iteration: int,
    where: str,
    names: Iterable[str],
    terms: Iterable[float],
    unseen: str | None = None,
    custom: str | None = None,
) -> NonFiniteError:
    """Makes the error of a loss or gradient that is not finite, in an iteration counted from 1, with the loss terms.

    ``unseen`` is the id of an environment whose numbers weren't looked at before, ``custom`` the name of a network of
    the user's own.
    """
    found = dict(zip(names, terms, strict=True))
    names = tuple(found)
    named = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    perhaps = "" if unseen is None else f"lockstep check {unseen} looks for rewards and observations that are none; "
    if custom is not None and math.isnan(found.get("entropy", 0.0)):
        perhaps += (
            f"no entropy: network.custom {custom} gave outputs that aren't finite; what is forbidden has a logit of "
            "-1e8 in place of -inf, or is told by env.action_mask; "
        )
    if "loss" in names:  # a term of the user's own
        perhaps += "loss is what your ppo.loss gave; if all terms are finite, its gradient isn't; "
    helps = "a smaller ppo.learning_rate or normalize.observations"
    if not math.isfinite(found.get("value_loss", 0.0)) and math.isfinite(found.get("entropy", math.nan)):
        learnt = "a smaller ppo.learning_rate, " if iteration > 1 else ""
        helps = f"{learnt}env.reward_scale, env.reward_clip or normalize.returns"  # for the policy is as it should be
    return NonFiniteError(
        f"non-finite loss or gradient in iteration {iteration}, {where} ({named}); {perhaps}{helps} may help"
    )
