"""An environment whose rewards are far too large."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Huge(gymnasium.Env):
    """Pays this reward for the first action, and twice as much for the other one."""

    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, reward):
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action):
        self._steps += 1
        return self._seen(), self._reward * (1.0 + float(action)), self._steps == 10, False, {}

    def _seen(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


gymnasium.register("Huge-v0", "huge_rewards:Huge")
