"""An environment that users might write, to be handed to ``lockstep.train``."""

import gc
import os

import gymnasium
import numpy as np


class Counting(gymnasium.Env):
    """Each step pays its action; an episode has ``length`` steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=10):
        self.length, self.steps = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return (
            np.array([self.steps / self.length, action], np.float32),
            float(action),
            self.steps >= self.length,
            False,
            {},
        )


def short(length=5):
    return Counting(length)


def overhearing(file):
    """Writes down which variables of Lockstep's an environment sees."""
    with open(file, "a") as out:
        out.writelines(f"{name}\n" for name in os.environ if name.startswith("LOCKSTEP_"))
    return Counting()


class Collected(Counting):
    """Writes down at each reset when Python's collector begins to look."""

    def __init__(self, file, length=10):
        super().__init__(length)
        self.file = file

    def reset(self, *, seed=None, options=None):
        with open(self.file, "a") as out:
            out.write(f"{gc.get_threshold()}\n")
        return super().reset(seed=seed, options=options)


class Wrapped(gymnasium.Wrapper):
    """A class whose metadata are those of what it wraps, so that the class itself has none."""

    def __init__(self, render_mode=None):
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))
