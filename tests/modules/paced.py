"""CartPole whose steps take a while for as long as the file ``$PACE`` exists, so that a run lasts until it may end."""

import os
import time
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

PACE = os.environ.get("PACE")
SECONDS = 0.02


class PacedCartPole(CartPoleEnv):
    """CartPole-v1, step for step."""

    def step(self, action):
        if PACE and Path(PACE).exists():
            time.sleep(SECONDS)
        return super().step(action)


gymnasium.register("PacedCartPole-v0", "paced:PacedCartPole", max_episode_steps=500)
