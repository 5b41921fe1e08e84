"""Environments that a run can use, with one carelessness each in what they return, draw, keep or close."""

import os
import random
import time
from types import MappingProxyType

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv


class Parts(CartPoleEnv):
    """Its observation is a Tuple, whose first part has another dtype than its space says."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = spaces.Tuple((self.observation_space, spaces.Discrete(2)))  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return self._parts(observation), info

    def step(self, action):
        observation, *rest = super().step(action)
        return self._parts(observation), *rest

    def _parts(self, observation):
        return observation.astype(np.float64), 1


class Frozen(CartPoleEnv):
    """Its observation is a mapping that is no dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = spaces.Dict({"pole": self.observation_space})  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return MappingProxyType({"pole": observation}), info

    def step(self, action):
        observation, *rest = super().step(action)
        return MappingProxyType({"pole": observation}), *rest


class Ragged(CartPoleEnv):
    """What its info says of an episode has rows of several lengths, beside a number."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        rows = [[1], [2, 3]]
        info = {"metrics": {"distance": 3.2, "per_agent": rows}, "success": rows, "score": rows}
        return observation, reward, terminated, truncated, info


class DrawsGlobally(CartPoleEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + 0.001 * np.random.rand(), *rest


class SeedsGlobally(CartPoleEnv):
    """Each of its episodes seeds Python's generator, and draws nothing."""

    def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return super().reset(seed=seed, options=options)


class SeedsTorch(CartPoleEnv):
    """Each of its episodes seeds PyTorch's generator, from which its steps draw."""

    def reset(self, *, seed=None, options=None):
        import torch

        torch.manual_seed(seed or 0)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        import torch

        observation, reward, *rest = super().step(action)
        return observation, reward + torch.rand(()).item(), *rest


class Saving(CartPoleEnv):
    """Its state can't be had, or given back, as ``$STATE_FAILS`` says."""

    def get_env_state(self):
        if os.environ.get("STATE_FAILS") == "get":
            raise RuntimeError("the disk\nis gone")
        if os.environ.get("STATE_FAILS") == "hang":
            time.sleep(3600)
        if os.environ.get("STATE_FAILS") == "words":
            return {"state": "somewhere"}
        return {"state": np.array(self.state, np.float64)}

    def set_env_state(self, state):
        if os.environ.get("STATE_FAILS") == "set":
            raise RuntimeError("no such state")
        self.state = tuple(state["state"])  # pyright: ignore[reportAttributeAccessIssue]


class Lingering(CartPoleEnv):
    """Its close never ends where ``$LINGERS`` is set, whatever is raised there; ``$BREAKS`` has a step raise."""

    taken = 0

    def step(self, action):
        self.taken += 1
        if "BREAKS" in os.environ and self.taken == 40:
            raise RuntimeError("the motor is gone")
        return super().step(action)

    def close(self):
        while "LINGERS" in os.environ and self.taken:
            try:
                time.sleep(3600)
            except Exception:
                continue


for kind in (Parts, Frozen, Ragged, DrawsGlobally, SeedsGlobally, SeedsTorch, Saving, Lingering):
    gymnasium.register(f"{kind.__name__}-v0", f"heedless:{kind.__name__}", max_episode_steps=30)
