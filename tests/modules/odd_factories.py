"""What users' functions give as environments: changed from outside, one for all, wrapped, hard to close."""

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
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


class Repeated(gymnasium.Wrapper):
    """Takes each action four times, and answers for the Pendulum inside it and for that one's time limit."""

    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.inside: Any = self.env

    def step(self, action):
        for _ in range(4):
            observation, reward, terminated, truncated, info = self.env.step(action)
            if truncated:
                break
        return observation, reward, terminated, truncated, info

    def get_env_state(self):
        return {"state": np.array(self.inside.unwrapped.state), "taken": np.array(self.inside._elapsed_steps)}

    def set_env_state(self, state):
        self.inside.unwrapped.state, self.inside._elapsed_steps = state["state"], int(state["taken"])


def repeated_pendulum(**_):
    return Repeated()


class Uncounted(gymnasium.Wrapper):
    """Answers for the Pendulum inside it, but not for that one's time limit."""

    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1", max_episode_steps=60))
        self.inside: Any = self.env

    def get_env_state(self):
        return {"state": np.array(self.inside.unwrapped.state)}

    def set_env_state(self, state):
        self.inside.unwrapped.state = state["state"]


def uncounted_pendulum(**_):
    return Uncounted()


class Accompanied(Hooked):
    """Starts programs, each of which it ends by another signal in its close; writes down how they ended."""

    ended_by = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.programs = [subprocess.Popen(["sleep", "60"]) for _ in self.ended_by] if "CODES" in os.environ else []

    def step(self, action):
        time.sleep(0.2 if self.programs else 0.0)
        return super().step(action)

    def close(self):
        if self.programs:
            for program, number in zip(self.programs, self.ended_by, strict=True):
                program.send_signal(number)
            Path(os.environ["CODES"]).write_text(str([program.wait() for program in self.programs]))


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
