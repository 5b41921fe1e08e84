"""Shapes the rewards that the learner gets: their sign, scaled, clipped; scores stay as the environment gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RewardShaping:
    """A function of one reward, the same for every environment and back end.

    It is applied to whole rollouts, after they were collected: what back ends, episode metrics, evaluations and
    replays see is the environment's own reward.

    Attributes:
        sign: -1, 0 or 1 in place of the reward (Mnih et al. 2015 clip Atari's so).
        scale: factor, after the sign was taken.
        clip: lowest and highest value, at the end; None: none.
    """

    sign: bool = False
    scale: float = 1.0
    clip: tuple[float, float] | None = None

    @property
    def identity(self) -> bool:
        """Whether rewards are left as they are."""
        return not self.sign and self.scale == 1.0 and self.clip is None

    def __call__(self, rewards: Any, xp: Any = np) -> Any:
        """Rewards to learn from, of the environment's: ``[…]``, arrays of the namespace ``xp``."""
        out: Any = xp.sign(rewards) if self.sign else rewards
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.clip is None else xp.clip(out, *self.clip)
