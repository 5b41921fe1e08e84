"""Environments that compute with libraries of which a rank's set-up, or its policy, might decide something."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

EQUATIONS = 128
"""Enough for OpenBLAS to share the solution among threads, by which its last bits differ."""


class Solving(gymnasium.Env):
    """Coupled numbers that wander chaotically; their forces are the solution of a linear system."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        a = np.random.default_rng(0).standard_normal((EQUATIONS, EQUATIONS))
        self._system = a @ a.T / EQUATIONS + np.eye(EQUATIONS)
        self._numbers, self._taken = np.zeros(EQUATIONS), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._numbers, self._taken = self.np_random.uniform(size=EQUATIONS), 0
        return self._numbers[:4].astype(np.float32), {}

    def step(self, action):
        self._taken += 1
        forces = np.linalg.solve(self._system, self._numbers)
        self._numbers = (3.9 * self._numbers * (1 - self._numbers) + 1e-3 * forces + 0.01 * action) % 1.0
        return self._numbers[:4].astype(np.float32), float(self._numbers[0]), False, self._taken >= 200, {}


class Descending(gymnasium.Env):
    """A point that moves along a gradient of PyTorch's, as a planner's or a differentiable simulator's does."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._taken = self.np_random.uniform(-1, 1, 2).astype(np.float32), 0
        return self._place.copy(), {}

    def step(self, action):
        self._taken += 1
        place = torch.tensor(self._place, requires_grad=True)
        (slope,) = torch.autograd.grad(torch.sin(3 * place).sum() * (2 * int(action) - 1), place)
        self._place = np.clip(self._place - 0.05 * slope.numpy(), -1, 1).astype(np.float32)
        return self._place.copy(), float(self._place.sum()), False, self._taken >= 20, {}


class Threaded(gymnasium.Env):
    """Ends each episode in its first step, with the number of threads that PyTorch has there as the reward."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(torch.get_num_threads()), True, False, {}


gymnasium.register("Solving-v0", "solving:Solving")
gymnasium.register("Descending-v0", "solving:Descending")
gymnasium.register("Threaded-v0", "solving:Threaded")
