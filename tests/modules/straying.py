"""Environments that stray, in one episode: by an index of no choice, or by a mask that allows nothing."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

PLAIN, GRID = spaces.Discrete(5, start=1), spaces.MultiDiscrete([10, 3])


class Straying(gymnasium.Env):
    """Observes in step 3 of that episode, what is beyond its choices.

    Args:
        stray: the seed; None: every one.
        kind: ``plain``, ``grid`` (in a Dict) or ``mask``, of which nothing strays but the mask.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, stray=None, kind="plain"):
        self._stray, self._kind = stray, kind
        self.observation_space = {
            "plain": PLAIN,
            "grid": spaces.Dict({"grid": GRID, "speed": spaces.Box(-1, 1, (2,))}),
            "mask": spaces.Dict({"at": PLAIN, "legal": spaces.MultiBinary(2)}),
        }[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._strays, self._steps = self._stray in (None, seed), 0
        return self._seen(), {}

    def step(self, action):
        self._steps += 1
        return self._seen(), float(action), self._steps == 6, False, {}

    def _seen(self):
        strays = self._strays and self._steps == 3
        if self._kind == "mask":
            return {"at": 1, "legal": np.full(2, int(not strays and self._steps < 6), np.int8)}
        if self._kind == "grid":
            return {"grid": np.array([4, 3 if strays else 2]), "speed": np.zeros(2, np.float32)}
        return 6 if strays else 1 + self._steps % 5


class OnTensors:
    """A simulator whose environment 1 strays in step 3 of seven, by its index or mask, or at a truncated end."""

    def __init__(self, num_envs, device, kind):
        self.num_envs, self.device, self._kind = num_envs, device, kind
        self.single_observation_space = spaces.Dict({"at": PLAIN, "legal": spaces.MultiBinary(2)})
        self.single_action_space, self.metadata = spaces.Discrete(2), {}

    def reset(self, *, seed=None):
        self._steps = 0
        return self._seen(), {}

    def step(self, actions):
        self._steps = (self._steps + 1) % 7
        ended = torch.full((self.num_envs,), self._steps == 0)
        cut, last = (ended if self._kind == "final" else ~ended & False), self._seen()
        last["at"][1] = 0
        info = {"final_observation": last} if self._kind == "final" else {}
        return self._seen(), torch.zeros(self.num_envs), ended & ~cut, cut, info

    def _seen(self):
        at, legal = torch.ones(self.num_envs, dtype=torch.int64), torch.ones(self.num_envs, 2, dtype=torch.int8)
        if self._steps == 3:
            at[1], legal[1] = {"index": (6, 1), "mask": (1, 0), "final": (1, 1)}[self._kind]
        return {"at": at, "legal": legal}


def on_tensors(num_envs, device, seed, kind):
    return OnTensors(num_envs, device, kind)


gymnasium.register("Straying-v0", "straying:Straying")
