"""Pendulum that takes ``$SECONDS`` a step."""

import os
import time

import gymnasium
from gymnasium.envs.classic_control.pendulum import PendulumEnv

SECONDS = float(os.environ.get("SECONDS", "0"))


class SlowPendulum(PendulumEnv):
    """Without ``$SECONDS`` it is Pendulum-v1; its episodes have 200 steps."""

    def step(self, u):
        time.sleep(SECONDS)
        return super().step(u)


gymnasium.register("SlowPendulum-v0", "slow:SlowPendulum", max_episode_steps=200)
