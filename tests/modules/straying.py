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
        kind: ``plain``, ``grid`` (in a Dict) or ``mask``, of which nothing strays but the mask; ``masks``, of two
            indices, of which the second one's strays.
        refuses: whether it raises for an action that its mask forbids.
        once: whether it begins no second episode with a mask that allows anything.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, stray=None, kind="plain", refuses=False, once=False):
        self._stray, self._kind, self._refuses, self._once = stray, kind, refuses, once
        self._episodes = 0
        if kind == "masks":
            self.action_space = spaces.MultiDiscrete([2, 3])
        self.observation_space = {
            "plain": PLAIN,
            "grid": spaces.Dict({"grid": GRID, "speed": spaces.Box(-1, 1, (2,))}),
            "mask": spaces.Dict({"at": PLAIN, "legal": spaces.MultiBinary(2)}),
            "masks": spaces.Dict({"at": PLAIN, "legal": spaces.MultiBinary(5)}),
        }[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._strays, self._steps = self._stray in (None, seed), 0
        self._episodes += 1
        self._lasts = 3 + (seed or 0) % 4 if self._once else 6
        return self._seen(), {}

    def step(self, action):
        if self._refuses and not self._legal()[action]:
            raise IndexError("the action is forbidden")
        self._steps += 1
        return self._seen(), float(np.sum(action)), self._steps == self._lasts, False, {}

    def _seen(self):
        strays = self._strays and self._steps == 3
        if self._kind == "mask":
            return {"at": 1, "legal": self._legal()}
        if self._kind == "masks":
            return {"at": 1, "legal": np.array([0, 1] + 3 * [int(not strays)], np.int8)}
        if self._kind == "grid":
            return {"grid": np.array([4, 3 if strays else 2]), "speed": np.zeros(2, np.float32)}
        return 6 if strays else 1 + self._steps % 5

    def _legal(self):
        strays, over = self._strays and self._steps == 3, self._once and self._episodes > 1
        return np.full(2, int(not strays and self._steps < self._lasts and not over), np.int8)


class OnTensors:
    """A simulator whose environment 1 strays in step 3 of seven, by its index or mask, or at a truncated end."""

    def __init__(self, num_envs, device, kind):
        self.num_envs, self.device, self._kind = num_envs, device, kind
        self.single_observation_space = spaces.Dict({"at": PLAIN, "legal": spaces.MultiBinary(2)})
        self.single_action_space, self.metadata = spaces.Discrete(2), {}
        if kind == "masks":
            self.single_observation_space["legal"] = spaces.MultiBinary(5)
            self.single_action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None):
        self._steps = 0
        return self._seen(), {}

    def step(self, actions):
        if self._kind == "refused" and self._steps == 3:
            raise IndexError("the action is forbidden")
        self._steps = (self._steps + 1) % 7
        ended = torch.full((self.num_envs,), self._steps == 0)
        cut, last = (ended if self._kind == "final" else ~ended & False), self._seen()
        last["at"][1] = 0
        info = {"final_observation": last} if self._kind == "final" else {}
        return self._seen(), torch.zeros(self.num_envs), ended & ~cut, cut, info

    def _seen(self):
        at, legal = torch.ones(self.num_envs, dtype=torch.int64), torch.ones(self.num_envs, 2, dtype=torch.int8)
        if self._kind == "masks":
            legal = torch.ones(self.num_envs, 5, dtype=torch.int8)
            legal[1, 2:] = int(self._steps != 3)
        elif self._steps == 3:
            at[1], legal[1] = {"index": (6, 1), "mask": (1, 0), "refused": (1, 0), "final": (1, 1)}[self._kind]
        return {"at": at, "legal": legal}


def on_tensors(num_envs, device, seed, kind):
    return OnTensors(num_envs, device, kind)


class NumbersOnTensors:
    """A simulator whose environment 1 gives NaN or infinity, after step 3 of seven or as an episode's last observation.

    The last observation is that of a ``cut`` episode, or else of a terminated one, which nothing reads.
    """

    def __init__(self, num_envs, device, kind, number):
        self.num_envs, self.device, self._kind, self._number = num_envs, device, kind, float(number)
        self.single_observation_space, self.metadata = spaces.Box(-1, 1, (2,)), {}
        self.single_action_space = spaces.Discrete(2)

    def reset(self, *, seed=None):
        self._steps = 0
        return torch.zeros(self.num_envs, 2), {}

    def step(self, actions):
        self._steps = (self._steps + 1) % 7
        seen, last = torch.zeros(2, self.num_envs, 2)
        ended = torch.full((self.num_envs,), self._steps == 0)
        (seen if self._kind == "seen" else last)[1, 1] = self._number if self._kind != "seen" or self._steps == 3 else 0
        cut = ended if self._kind == "cut" else ended & False
        return seen, torch.zeros(self.num_envs), ended & ~cut, cut, {"final_observation": last}


def numbers_on_tensors(num_envs, device, seed, kind, number="nan"):
    return NumbersOnTensors(num_envs, device, kind, number)


gymnasium.register("Straying-v0", "straying:Straying")
