"""An environment that gives metrics of its own in ``info["metrics"]``, some of them nobody can average."""

import gymnasium
import numpy as np
from handed_envs import Counting


class Stating(Counting):
    """Says what it knows of the episode so far at each step; ``rare`` in episodes of an even return alone."""

    def __init__(self, length=10, **_):
        super().__init__(length)
        self.total = 0.0

    def reset(self, *, seed=None, options=None):
        """Starts an episode whose length depends on the seed."""
        observation, info = super().reset(seed=seed)
        self.total, self.length = 0.0, 4 + int(self.np_random.integers(5))
        return observation, info

    def step(self, action):
        """Counts what is paid."""
        observation, reward, terminated, truncated, info = super().step(action)
        self.total += reward
        stated = {"length": self.steps, "total": np.float32(self.total), "ended": np.array([terminated])}
        stated |= {"rare": 1.0} if self.total % 2 == 0 else {}
        stated |= {"words": "none", "pair": np.ones(2), "endless": float("inf")}
        return observation, reward, terminated, truncated, info | {"metrics": stated}


gymnasium.register("Stating-v0", Stating)
