"""Limits of an update, the same in both engines: learning rates, KL divergence, gradient norm, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lockstep.config.run import Config
from lockstep.core.errors import NonFiniteError

KL_STOP_FACTOR = 1.5
"""An update stops after a minibatch whose KL divergence exceeds this factor times ``ppo.target_kl``."""
KL_NOISE = 1e-6
"""Share of ``ppo.desired_kl`` up to which a KL divergence is treated as rounding.

At an update's first minibatch the policy is still the one that acted, so its KL differs from 0 by rounding only.
"""
LEARNING_RATE_LIMITS = (1e-5, 1e-2)
"""Limits of the adaptive schedule."""
LEARNING_RATE_FACTOR = 1.5
LARGE_KL, SMALL_KL = 2.0, 0.5
"""Factors of ``ppo.desired_kl``: above the first the adaptive schedule lowers the rate, below the second it raises."""
CLIP_EPSILON = 1e-6
ADVANTAGE_EPSILON = 1e-8
"""Added to the standard deviation that a minibatch's advantages are divided by."""
GROUP_EPSILON = 1e-8
"""Added to the standard deviation that a group's returns are divided by."""
GROUP_ROUNDING = 2.0**-23
"""Share of a return's sum of absolute rewards by which two equal returns may differ if rewards are float32.

Each reward is rounded by at most 2⁻²⁴ of itself.
"""
RETURN_ROUNDING = 2.0**-22
"""Share of the numbers that a critic's target is made of by which equal targets may differ, in float32."""


def minibatch_name(config: Config, index: int) -> str:
    """Names the minibatch of an update by its place among those of all epochs, which counts from 0.

    With ``sync_period`` it names the period that ends with this minibatch, because which one failed isn't known.
    """
    epoch, minibatch = divmod(index, config.ppo.num_minibatches)
    steps = index % config.sync_period + 1
    which = "minibatch" if steps == 1 else f"the {steps} minibatches up to"
    return f"epoch {epoch + 1}, {which} {minibatch + 1}"


def non_finite(
    iteration: int,
    where: str,
    names: Iterable[str],
    terms: Iterable[float],
    unseen: str | None = None,
    custom: str | None = None,
) -> NonFiniteError:
    """Returns the error for a loss or gradient that isn't finite, with the loss terms; iterations count from 1.

    ``unseen`` is the id of an environment whose numbers weren't checked, ``custom`` the name of a user's own network.
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
    if "loss" in names:  # a term that is the user's own
        perhaps += "loss is what your ppo.loss gave; if all terms are finite, its gradient isn't; "
    helps = "a smaller ppo.learning_rate or normalize.observations"
    if not math.isfinite(found.get("value_loss", 0.0)) and math.isfinite(found.get("entropy", math.nan)):
        learnt = "a smaller ppo.learning_rate, " if iteration > 1 else ""
        helps = f"{learnt}env.reward_scale, env.reward_clip or normalize.returns"  # for the policy is as it should be
    return NonFiniteError(
        f"non-finite loss or gradient in iteration {iteration}, {where} ({named}); {perhaps}{helps} may help"
    )


def non_finite_statistics(iteration: int, normalized: str) -> NonFiniteError:
    """Returns the error for running statistics that aren't finite after an iteration; 0 is the random policy's.

    ``normalized`` is what they are of: ``observations`` or ``returns``.
    """
    when = f"after iteration {iteration}" if iteration else "of a random policy"
    what, helps = {
        "observations": ("an observation", "let the environment clip what it shows, or leave normalize.observations"),
        "returns": ("a reward, or a discounted sum of them,", "env.reward_scale or env.reward_clip may help"),
    }[normalized]
    return NonFiniteError(
        f"non-finite statistics {when}, of normalize.{normalized}: {what} is infinite, NaN or too large to be squared; "
        f"{helps}"
    )
