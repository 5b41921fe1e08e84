"""An environment that no seed and no replay brings back, but its own state hooks do."""

import itertools

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Hooked(gymnasium.Env):
    """Observes a walk, seeded like any other but for a drift that each instance has of its own."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)
    _instances = itertools.count(1)

    def __init__(self, **_):
        self._drift = next(self._instances) / 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._taken = self.np_random.random(), 0
        return self._observation(), {}

    def step(self, action):
        self._place += (2 * int(action) - 1) * self._drift
        self._taken += 1
        return self._observation(), self._place, False, False, {}

    def _observation(self):
        return np.array([self._place, self._taken], np.float32)

    def get_env_state(self):
        return {"place": np.array(self._place), "taken": np.array(self._taken), "drift": np.array(self._drift)}

    def set_env_state(self, state):
        self._place, self._taken, self._drift = float(state["place"]), int(state["taken"]), float(state["drift"])


gymnasium.register("Hooked-v0", Hooked, max_episode_steps=30)
