"""Small tasks that each need one thing of the agent: eyes, a mask, all parts of an observation, memory, noise by state.

An episode has 16 steps and a step's reward is at most 1. Nothing that an action does changes what comes next, so a
policy is good as soon as it reads its observation right; ``Recall`` alone rewards what was seen some steps ago.
``hidden`` takes something away that the task needs, so that only guessing is left.
"""

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

STEPS = 16


class Task(gymnasium.Env, ABC):
    """Rewards each action by itself."""

    @abstractmethod
    def _draw(self) -> Any:
        """The next observation."""

    @abstractmethod
    def _reward(self, action) -> float:
        """Of an action that answers the last observation."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), self._info()

    def step(self, action):
        reward = float(self._reward(action))  # before the next observation is drawn
        return self._draw(), reward, False, False, self._info()

    def _info(self):
        return {}


class Corner(Task):
    """Which quarter of the image is lit? The light has 2 x 2 pixels anywhere in it; ``first``: channels come first."""

    action_space = Discrete(4)

    def __init__(self, size=8, first=False, hidden=False):
        self._size, self._first, self._hidden = size, first, hidden
        self.observation_space = Box(0, 255, (3, size, size) if first else (size, size, 3), np.uint8)

    def _draw(self):
        self._lit, half = int(self.np_random.integers(4)), self._size // 2
        row, column = self.np_random.integers(0, half - 1, 2) + half * np.array(divmod(self._lit, 2))
        image = np.zeros((self._size, self._size, 3), np.uint8)
        image[row : row + 2, column : column + 2] = 0 if self._hidden else self.np_random.integers(100, 256, 3)
        return image.transpose(2, 0, 1) if self._first else image

    def _reward(self, action):
        return action == self._lit


class Allowed(Task):
    """Three of twelve actions are allowed, and only the mask says which: 1 for the lowest of them, -1 for others."""

    action_space, observation_space = Discrete(12), Box(0, 1, (2,), np.float32)

    def _draw(self):
        self._open = np.sort(self.np_random.choice(12, 3, replace=False))
        return np.zeros(2, np.float32)

    def _info(self):
        return {"action_mask": np.isin(np.arange(12), self._open).astype(np.int8)}

    def _reward(self, action):
        return int(action == self._open[0]) - int(action not in self._open)


class Parts(Task):
    """A nested Dict of five parts, and an action of five indices, each of which one part tells; equal shares of 1.

    ``hidden``: a part that shows something else than what is asked for.
    """

    action_space = MultiDiscrete([3, 2, 2, 2, 2])
    observation_space = Dict(
        {
            "colour": Discrete(3, start=-1),
            "dials": MultiDiscrete([3, 2]),
            "arm": Dict({"speed": Box(-3, 3, (2,), np.float32), "bits": MultiBinary(2)}),
            "camera": Box(0, 255, (6, 6), np.uint8),
        }
    )

    def __init__(self, hidden=""):
        self._hidden = hidden

    def _draw(self):
        seen = self._observation()
        arm = seen["arm"]
        lit = int(seen["camera"][0, -1] > 0)
        self._told = (seen["colour"] + 1, seen["dials"][1], arm["speed"][0] > 0, arm["bits"][1], lit)
        for part in (seen, arm):
            if self._hidden in part:
                other = self._observation()
                part[self._hidden] = (other | other["arm"])[self._hidden]
        return seen

    def _observation(self):
        draw = self.np_random
        camera, side = np.zeros((6, 6), np.uint8), 3 * int(draw.integers(2))
        camera[:, side : side + 3] = 200
        arm = {"speed": draw.uniform(-3, 3, 2).astype(np.float32), "bits": draw.integers(0, 2, 2).astype(np.int8)}
        return {"colour": int(draw.integers(3)) - 1, "dials": draw.integers(0, [3, 2]), "arm": arm, "camera": camera}

    def _reward(self, action):
        return np.mean(np.equal(action, self._told))


class Switches(Task):
    """Set the switches the other way round than the bits seen; equal shares of 1."""

    action_space, observation_space = MultiBinary(3), MultiBinary(3)

    def __init__(self, hidden=False):
        self._hidden = hidden

    def _draw(self):
        self._bits = self.np_random.integers(0, 2, 3).astype(np.int8)
        return np.zeros(3, np.int8) if self._hidden else self._bits

    def _reward(self, action):
        return np.mean(action != self._bits)


class Aim(Task):
    """Hit two marks that the observation tells, within uneven bounds: 1 less the mean squared miss, in half ranges."""

    observation_space = Box(-1, 1, (2,), np.float32)
    low, high = np.array([-1, 2], np.float32), np.array([3, 8], np.float32)
    action_space = Box(low, high)

    def __init__(self, hidden=False):
        self._hidden = hidden

    def _draw(self):
        self._mark = self.np_random.uniform(-0.8, 0.8, 2)
        return np.zeros(2, np.float32) if self._hidden else self._mark.astype(np.float32)

    def _reward(self, action):
        place = 2.0 * (action - self.low) / (self.high - self.low) - 1.0
        return 1.0 - np.mean((place - self._mark) ** 2)


class Nerves(Task):
    """Keep still when the observation is 0, and when it is 1 do what you didn't do the last time that it was.

    Being still costs three times the distance from 0; the other pays the distance from the last such action, which the
    observation doesn't tell: only noise there pays, and the same noise everywhere costs more than it pays.
    """

    observation_space, action_space = Discrete(2), Box(-1, 1, (1,), np.float32)

    def _draw(self):
        self._wild = int(self.np_random.integers(2))
        return self._wild

    def reset(self, *, seed=None, options=None):
        self._last = 0.0
        return super().reset(seed=seed)

    def _reward(self, action):
        place = float(action[0])
        if not self._wild:
            return -3.0 * abs(place)
        distance, self._last = abs(place - self._last), place
        return distance


class Recall(gymnasium.Env):
    """Give back at the last step, by 1 or -1, the cue that only the first one shows."""

    action_space, observation_space = Discrete(2), Box(-1, 1, (3,), np.float32)

    def __init__(self, steps=6):
        self._steps = steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._cue, self._clock = int(self.np_random.integers(2)), 0
        return self._observation(), {}

    def _observation(self):
        cue = 2 * self._cue - 1 if self._clock == 0 else 0
        return np.array([cue, self._clock == 0, self._clock == self._steps - 1], np.float32)

    def step(self, action):
        self._clock += 1
        last = self._clock == self._steps
        reward = (1.0 if action == self._cue else -1.0) if last else 0.0
        return self._observation(), reward, last, False, {}


for _name in ("Corner", "Allowed", "Parts", "Switches", "Aim", "Nerves"):
    gymnasium.register(f"{_name}-v0", f"tasks:{_name}", max_episode_steps=STEPS)
gymnasium.register("Recall-v0", "tasks:Recall")
