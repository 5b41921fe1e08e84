"""Environments at whose ends something is wrong, and one that remembers its episodes and keeps that by hooks."""

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

ROLLOUT = 16


class UnseenAtTheEnd(CartPoleEnv):
    """A rollout's last observation is none, but for the next rollout nobody asks."""

    steps = 0

    def step(self, action):
        observation, *rest = super().step(action)
        self.steps += 1
        return observation * (np.nan if self.steps == ROLLOUT else 1.0), *rest


class UnseenWhenTruncated(CartPoleEnv):
    """Nobody but the critic sees the observation that truncates an episode."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, **kwargs):
        self.steps = 0
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, *_ = super().step(action)
        self.steps += 1
        over = self.steps == 6
        return observation * (np.inf if over else 1.0), reward, False, over, {}


class Wearing(CartPoleEnv):
    """Each episode pays less than the one before; its state hooks keep how many there were."""

    before = 0

    def reset(self, **kwargs):
        self.before += 1
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, float(reward) / self.before * (1 + observation[0]), *rest

    def get_env_state(self):
        return {"state": np.array(self.state, np.float64), "before": np.array(self.before)}

    def set_env_state(self, arrays):
        self.state = tuple(arrays["state"])  # pyright: ignore[reportAttributeAccessIssue]
        self.before = int(arrays["before"])


class WearingInPlace(Wearing):
    """Its hooks give the array that it counts in, and keep the one that they are given."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.before = np.zeros((), np.int64)

    def get_env_state(self):
        return {"state": np.array(self.state, np.float64), "before": self.before}

    def set_env_state(self, arrays):
        self.state = tuple(arrays["state"])  # pyright: ignore[reportAttributeAccessIssue]
        self.before = arrays["before"]


for kind in (UnseenAtTheEnd, UnseenWhenTruncated, Wearing, WearingInPlace):
    gymnasium.register(f"{kind.__name__}-v0", f"remembering:{kind.__name__}", max_episode_steps=12)
