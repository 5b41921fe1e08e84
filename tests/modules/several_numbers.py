"""An environment whose actions are several numbers, and which a reset starts anew."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete


class Dials(gymnasium.Env):
    """Shows where two dials were turned to, until chance ends it."""

    observation_space = Box(0, 1, (2,), np.float32)
    action_space = MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.float32(action) / 2, 1.0, bool(self.np_random.random() < 0.02), False, {}


gymnasium.register("Dials-v0", "several_numbers:Dials")
