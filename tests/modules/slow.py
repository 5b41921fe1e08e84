"""Pendulums that take ``$SECONDS`` a step, or ``$MAKING`` seconds to be made."""

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


class SlowlyMade(PendulumEnv):
    """Without ``$MAKING`` it is Pendulum-v1."""

    def __init__(self, **kwargs):
        time.sleep(float(os.environ.get("MAKING", "0")))
        super().__init__(**kwargs)


gymnasium.register("SlowlyMade-v0", "slow:SlowlyMade", max_episode_steps=200)
gymnasium.register("SlowPendulum-v0", "slow:SlowPendulum", max_episode_steps=200)
