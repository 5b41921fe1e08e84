"""Shapes the rewards that the learner gets: sign, scale and clipping; reported scores stay the environment's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RewardShaping:
    """Shapes each reward by itself, in the same way for every environment and back end.

    It is applied to whole rollouts, after they were collected. Back ends, episode metrics, evaluations and replays see
    the environment's own rewards.

    Attributes:
        sign: whether the sign -1, 0 or 1 replaces the reward, as in Mnih et al. 2015 for Atari.
        scale: factor, applied after the sign.
        clip: lowest and highest value, applied last; None: no clipping.
    """

    sign: bool = False
    scale: float = 1.0
    clip: tuple[float, float] | None = None

    @property
    def identity(self) -> bool:
        """Whether rewards stay as they are."""
        return not self.sign and self.scale == 1.0 and self.clip is None

    @np.errstate(over="ignore", invalid="ignore")
    def __call__(self, rewards: Any, xp: Any = np) -> Any:
        """Returns the shaped rewards ``[…]``, arrays of the namespace ``xp``."""
        out: Any = xp.sign(rewards) if self.sign else rewards
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.clip is None else xp.clip(out, *self.clip)
