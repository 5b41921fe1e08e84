"""A loss of one's own, by operators that arrays of both engines have."""

from __future__ import annotations

from typing import Any

import lockstep


def penalised(sample: lockstep.LossSample, weight: float = 1e-3) -> Any:
    """PPO's, and what the actor says squared."""
    return sample.ppo() + weight * (sample.actor_output**2).sum(-1)
