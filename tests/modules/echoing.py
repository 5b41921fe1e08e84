"""Environments whose observation is the action they were given, as it reached them."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Echo(gymnasium.Env):
    """Observes the last action, zeros after a reset; the reward is its sum."""

    def __init__(self, action_space, size):
        self.action_space, self._size = action_space, size
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self._size, np.float32), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} of shape {np.shape(action)} is not in {self.action_space}")
        echo = np.asarray(action, np.float32).reshape(-1)
        return echo, float(echo.sum()), False, False, {}


BOUNDED = Box(np.array([[-1.0, -2.0]], np.float32), np.array([[1.0, 0.5]], np.float32))

gymnasium.register("EchoBox-v0", lambda **_: Echo(BOUNDED, 2))
gymnasium.register("EchoDiscrete-v0", lambda **_: Echo(Discrete(3, start=5), 1))
