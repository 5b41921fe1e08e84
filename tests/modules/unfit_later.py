"""Environments whose one mistake comes late or seldom: at an episode's end, in a constructor, in a state hook."""

import itertools
import multiprocessing
import os
import sys
import threading

import gymnasium
import numpy as np
from gymnasium import spaces


class Fit(gymnasium.Env):
    """Observes three random numbers; each episode is truncated after ``length`` steps."""

    t = 0

    def __init__(self, length=20, render_mode=None):
        self.length = length
        self.observation_space: gymnasium.Space = spaces.Box(-10, 10, (3,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observed(), {}

    def observed(self):
        return self.np_random.standard_normal(3).astype(np.float32).clip(-9, 9)

    def step(self, action):
        self.t += 1
        return self.observed(), 1.0, False, self.t >= self.length, {}


class LastIsNaN(Fit):
    def observed(self):
        drawn = super().observed()
        return np.full_like(drawn, np.nan) if self.t == self.length else drawn


class LastIsOutside(Fit):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Discrete(4)

    def observed(self):
        return 4 if self.t == self.length else int(self.np_random.integers(4))


class LastIsRandom(Fit):
    def observed(self):
        drawn = super().observed()
        return np.frombuffer(os.urandom(3), np.uint8).astype(np.float32) / 100 if self.t == self.length else drawn


class ExitsInStep(Fit):
    def step(self, action):
        if self.t == 5:
            sys.exit(0)
        return super().step(action)


class ExitsInReset(Fit):
    def reset(self, *, seed=None, options=None):
        sys.exit(0)


class ExitsWhereMade(Fit):
    def __init__(self, made_before=0):
        super().__init__()
        if next(MADE) == made_before:
            sys.exit(3)


MADE = itertools.count()


class WaitsWhereMade(Fit):
    """The environment number ``made_before`` waits where it is made until :data:`RELEASED` is set."""

    def __init__(self, made_before=0):
        super().__init__()
        if next(MADE) == made_before:
            RELEASED.wait()


class WaitsInStep(Fit):
    def step(self, action):
        if self.t == 5:
            RELEASED.wait()
        return super().step(action)


RELEASED = threading.Event()


class NoInfo(Fit):
    def step(self, action):
        return (*super().step(action)[:4], None)


class Swapped(Fit):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, info, not truncated


class PaidInText(Fit):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, "1.5", *rest


class SeenInText(Fit):
    def observed(self):
        return super().observed().astype(str)


class HasAChild(Fit):
    def __init__(self):
        super().__init__()
        self.child = multiprocessing.get_context("spawn").Process(target=int)
        self.child.start()

    def close(self):
        self.child.join()


class Kept(Fit):
    """Has state hooks, which hold nothing: everything follows from seed and actions."""

    def get_env_state(self):
        return {}

    def set_env_state(self, state):
        raise AssertionError("there is nothing to take back")


class KeptAsNone(Kept):
    def get_env_state(self):
        return None


class Listed(Kept):
    def get_env_state(self):
        return [self.t]


class Numbered(Kept):
    def get_env_state(self):
        return {0: np.array(self.t)}


class Imaginary(Kept):
    def get_env_state(self):
        return {"t": np.array(self.t), "wave": np.array([1 + 2j])}


class Long(Kept):
    def get_env_state(self):
        return {"t": np.longdouble(self.t)}


class OwnLimit(Fit):
    def __init__(self, max_episode_steps=10):
        super().__init__(max_episode_steps)


def made_with(**kwargs):
    return OwnLimit(**kwargs)
