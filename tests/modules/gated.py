"""CartPole that stands still in the fifth iteration for as long as the file ``$GATE`` exists, then goes on slowly.

In the seventh it does so for as long as ``$GATE.later`` exists.
"""

import os
import time
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

GATE = os.environ.get("GATE")
STOPS_AT = 72  # in the fifth iteration of 16 steps
STOPS_LATER = 104  # in the seventh
SECONDS = 0.01


class GatedCartPole(CartPoleEnv):
    """Without ``$GATE`` it is CartPole-v1, step for step."""

    _steps = 0

    def step(self, action):
        self._steps += 1
        if GATE and self._steps >= STOPS_AT:
            while Path(GATE).exists() or (self._steps >= STOPS_LATER and Path(f"{GATE}.later").exists()):
                time.sleep(SECONDS)
            time.sleep(SECONDS)
        return super().step(action)


gymnasium.register("GatedCartPole-v0", "gated:GatedCartPole", max_episode_steps=500)
