"""CartPole whose steps now and then take longer: what ranks that meet wait for.

``$SLEEP_CHANCE`` of a step's taking ``$SLEEP_SECONDS`` more on average, exponentially distributed. The draws are no
run's own: every process has others.
"""

import os
import random
import time

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

CHANCE, SECONDS = float(os.environ.get("SLEEP_CHANCE", "0")), float(os.environ.get("SLEEP_SECONDS", "0"))
_random = random.Random(os.urandom(8))


class SleepyCartPole(CartPoleEnv):
    """CartPole-v1, step for step."""

    def step(self, action):
        if _random.random() < CHANCE:
            time.sleep(_random.expovariate(1.0 / SECONDS))
        return super().step(action)


gymnasium.register("SleepyCartPole-v0", "benchmarks.sleepy:SleepyCartPole", max_episode_steps=500)
