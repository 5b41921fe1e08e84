"""An environment that says whether its task was solved, under the name and in the form asked for."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

FORMS = {"bool": bool, "numpy": np.bool_, "float": float, "array": lambda solved: np.array([solved]), "text": str}


class Telling(gymnasium.Env):
    """Counts actions 1; an episode of six steps is solved if there were at least three. `form` None: says nothing."""

    observation_space = Box(0, 6, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, name="is_success", form="bool", **_):
        self._name, self._form = name, form

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._ones = self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._ones += int(action)
        self._steps += 1
        info = {} if self._form is None else {self._name: FORMS[self._form](self._ones >= 3)}
        return np.array([self._ones], np.float32), 0.0, self._steps == 6, False, info


gymnasium.register("Telling-v0", Telling)
