"""CartPole whose process is killed by a fault of its own in the step of a number."""

import ctypes
import os

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

AT = int(os.environ.get("DIES_AT", "80"))


class DyingCartPole(CartPoleEnv):
    _steps = 0

    def step(self, action):
        self._steps += 1
        if self._steps == AT:
            ctypes.string_at(0)
        return super().step(action)


gymnasium.register("DyingCartPole-v0", "dying:DyingCartPole", max_episode_steps=500)
