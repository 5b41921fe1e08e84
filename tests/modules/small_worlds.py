"""Environments with spaces that the usual ones lack: an image beside numbers, and actions that are forbidden."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Lantern(gymnasium.Env):
    """A light in an image moves left or right by the action; a nested Dict with an image, a vector and an index."""

    action_space = Discrete(2, start=1)
    observation_space = Dict(
        {
            "view": Dict({"camera": Box(0, 255, (6, 6, 3), np.uint8)}),
            "speed": Box(-5, 5, (2,), np.float32),
            "colour": Discrete(3, start=-1),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._colour = int(self.np_random.integers(6)), int(self.np_random.integers(3))
        self._speed = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self._left = int(self.np_random.integers(3, 15))
        return self._observation(), {}

    def step(self, action):
        self._place = (self._place + 2 * int(action) - 3) % 6
        self._speed = self._speed * np.float32(0.9)
        self._left -= 1
        return self._observation(), float(self._place == self._colour), self._left == 0, False, {}

    def _observation(self):
        camera = np.zeros((6, 6, 3), np.uint8)
        camera[:, self._place, self._colour] = 200
        return {"view": {"camera": camera}, "speed": self._speed, "colour": self._colour - 1}


class Doors(gymnasium.Env):
    """Two choices at once, of which some are forbidden and raise; the mask comes by ``info`` and by a method."""

    action_space = MultiDiscrete([3, 2])
    observation_space = Box(0, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(3, 15))
        return self._next()

    def _next(self):
        self._closed = int(self.np_random.integers(3))
        self._stuck = bool(self.np_random.integers(2))
        observation = np.eye(3, dtype=np.float32)[self._closed]
        return observation, {"action_mask": self.action_masks()}

    def action_masks(self):
        return (np.arange(3) != self._closed, np.array([True, not self._stuck]))

    def step(self, action):
        door, push = (int(a) for a in action)
        if door == self._closed or (push and self._stuck):
            raise ValueError(f"{action} is forbidden")
        self._left -= 1
        reward = float(door == (self._closed + 1) % 3) + 0.1 * push
        observation, info = self._next()
        return observation, reward, self._left == 0, False, info


gymnasium.register("Lantern-v0", "small_worlds:Lantern", max_episode_steps=10)
gymnasium.register("Doors-v0", "small_worlds:Doors", max_episode_steps=10)
