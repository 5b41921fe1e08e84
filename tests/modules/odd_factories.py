"""What users' functions give as environments: changed from outside, one for all, wrapped, hard to close."""

import itertools
import os
from pathlib import Path

import gymnasium
from gymnasium.wrappers import ClipReward, FrameStackObservation, TransformReward
from hooked import Hooked

ONE = gymnasium.make("CartPole-v1")


def rewarded_tenfold(**_):
    env = gymnasium.make("CartPole-v1")
    inner = env.step

    def step(action):
        observation, reward, *rest = inner(action)
        return observation, 10 * float(reward), *rest

    env.step = step  # pyright: ignore[reportAttributeAccessIssue]
    return env


def always_the_same(**_):
    return ONE


def stacked_walk(**_):
    return FrameStackObservation(Hooked(), 2)


def clipped_walk(**_):
    return ClipReward(Hooked(), -1.0, 1.0)


def scaled_walk(**_):
    return TransformReward(Hooked(), lambda reward: float(reward) / 2)


class Passing(gymnasium.Wrapper):
    """Passes on whatever is asked of it."""

    def __getattr__(self, name):
        return getattr(self.env, name)


def passed_walk(**_):
    return Passing(Hooked())


class Sworn(gymnasium.Wrapper):
    """Answers for its own state and that of what it holds."""

    def get_env_state(self):
        return self.env.get_env_state()  # pyright: ignore[reportAttributeAccessIssue]

    def set_env_state(self, state):
        self.env.set_env_state(state)  # pyright: ignore[reportAttributeAccessIssue]


def sworn_walk(**_):
    return Sworn(stacked_walk().env)


NUMBERS = itertools.count()
"""Unlike ``id``, never that of an environment that is gone."""


class Closing(Hooked):
    """Leaves a file when it is closed, and may fail then."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.number = next(NUMBERS)

    def close(self):
        if os.environ.get("CLOSE_FAILS"):
            raise RuntimeError("renderer\ngone")
        if place := os.environ.get("CLOSED_IN"):
            Path(place, f"{os.getpid()}-{self.number}").touch()
