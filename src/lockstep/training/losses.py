"""Coefficients and terms of the losses of PPO and GRPO; each engine has the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the engines' mathematics stands on this module, and on no config
    from lockstep.config.run import Config

TERMS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
REFERENCE_KL = "reference_kl"


@dataclass(frozen=True)
class LossSettings:
    """Coefficients of the loss; a scheduled one is a scalar that is traced or on a device.

    Attributes:
        clip_range: of the probability ratio.
        value_clip_range: of values around those before the update; None: none.
        count: valid samples of the global minibatch, by which sums are divided: an int, or a scalar that is traced or
            on a device.
        kl_coef: weight of the divergence from GRPO's reference policy.
    """

    clip_range: Any
    value_clip_range: Any
    entropy_coef: Any
    value_coef: float
    count: Any
    kl_coef: float = 0.0

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, in order."""
        return (*TERMS, REFERENCE_KL) if self.kl_coef else TERMS

    def counting(self, count: Any) -> LossSettings:
        """Returns the same coefficients with another count, at which nothing looks if it is a tensor's."""
        return self if isinstance(count, int) and count == self.count else replace(self, count=count)

    def scheduled(self, coefficients: Mapping[str, Any] | None) -> LossSettings:
        """Returns the same with those coefficients, by name, that an iteration has by a schedule."""
        return replace(self, **coefficients) if coefficients else self


def loss_settings(config: Config, count: Any = None) -> LossSettings:
    """Reads the coefficients from a config; ``count`` is by default that of a minibatch whose samples are all valid."""
    ppo = config.ppo
    return LossSettings(
        clip_range=ppo.clip_range,
        value_clip_range=ppo.value_clip_range,
        entropy_coef=ppo.entropy_coef,
        value_coef=ppo.value_coef,
        count=config.steps_per_iteration // ppo.num_minibatches if count is None else count,
        kl_coef=config.grpo.kl_coef if config.algorithm == "grpo" else 0.0,
    )
