"""Array environments with tensors: one call steps a whole group, on a GPU without reading its values.

Random numbers are made on the device, by hashing (key, counter), so that nothing waits for the host: SplitMix64 (Steele
et al. 2014, "Fast splittable pseudorandom number generators"), whose n-th output is a function of n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from lockstep.core.episodes import EPISODES_PER_ITERATION
from lockstep.core.shards import KeyedDraws
from lockstep.core.spaces import observation_layout
from lockstep.envs.arrays import ArrayEnvironment
from lockstep.torch_engine.envs.simulators import Step, encode
from lockstep.torch_engine.nets.memory import on_host

_GOLDEN, _FIRST, _SECOND = (
    int(np.uint64(x).astype(np.int64)) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_STEPS = 32
"""Bits of a counter that count the steps of an episode."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 to the right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(keys: Tensor, counters: Tensor, draws: int) -> Tensor:
    """Draws numbers uniform in [0, 1), float32 ``[n, draws]``: a function of each key and counter, int64 ``[n]``."""
    columns = torch.arange(1, draws + 1, device=keys.device)
    x = _mixed(keys.unsqueeze(1) + (counters.unsqueeze(1) * draws + columns) * _GOLDEN)
    return _shifted(x, 40).float() * 2.0**-24


def of_steps(keys: Tensor, episodes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and counters of steps of episodes, int64 ``[n]`` each; see :func:`uniform`.

    An episode's number that begins with an iteration's doesn't fit into a counter; the key takes the iteration's part.
    """
    iterations, episodes = episodes // EPISODES_PER_ITERATION, episodes % EPISODES_PER_ITERATION
    return keys ^ _mixed(iterations * _GOLDEN), (episodes << _STEPS) + steps  # iteration 0 leaves the key as it is


class TensorArrays:
    """Steps a group of environments of one array environment; resets ended episodes in the same step.

    Attributes:
        state: arrays ``[n, …]``.
        elapsed: steps of the live episodes, int64 ``[n]``; ``episodes``: their indices, int64 ``[n]``.
    """

    def __init__(self, env: ArrayEnvironment, seed: int, keys: Sequence[int], limit: int, device: torch.device) -> None:
        self._env, self._limit, self._device = env, limit, device
        self._layout = observation_layout(env.observation_space)
        self._keys, self._step_keys = (self._hashed(seed, purpose, keys) for purpose in ("tensor", "tensor/step"))
        self.elapsed = torch.zeros(len(keys), dtype=torch.int64, device=device)
        self.episodes = torch.zeros_like(self.elapsed)
        self.state: dict[str, Tensor] = {}

    def _hashed(self, seed: int, purpose: str, keys: Sequence[int]) -> Tensor:
        if self._device.type == "meta":  # only shapes are asked for
            return torch.zeros(len(keys), dtype=torch.int64, device=self._device)
        keyed = KeyedDraws()
        drawn = [keyed.generator(seed, purpose, key).integers(-(2**63), 2**63 - 1) for key in keys]
        return torch.tensor(drawn, dtype=torch.int64, device=self._device)

    def reset(self, episodes: Tensor) -> Tensor:
        """Starts these episodes ``[n]``; returns the rows ``[n, width]`` of their first observations."""
        self.episodes = episodes.clone()
        self.elapsed = torch.zeros_like(self.elapsed)
        fresh, observation = self._first()
        self.state = {name: values.clone() for name, values in fresh.items()}
        return observation

    def _first(self) -> tuple[dict[str, Tensor], Tensor]:
        state, observation = self._env.reset(xp, uniform(self._keys, self.episodes, self._env.reset_draws))
        return state, self._rows(observation)

    def _rows(self, observation: Tensor) -> Tensor:
        return encode(self._layout, observation, len(observation))

    @property
    def memory(self) -> dict[str, Tensor]:
        """The tensors that a step changes, by name."""
        state = {f"state/{name}": values for name, values in self.state.items()}
        return state | {"elapsed": self.elapsed, "episodes": self.episodes}

    def stay_in(self, memory: Mapping[str, Tensor]) -> None:
        """Uses tensors of :attr:`memory`'s names and shapes from here on, with the values they hold."""
        self.state = {name: memory[f"state/{name}"] for name in self.state}
        self.elapsed, self.episodes = memory["elapsed"], memory["episodes"]

    def move_to(self, memory: Mapping[str, Tensor]) -> None:
        """Copies what a step changes into tensors of :attr:`memory`'s names and shapes, and uses those from here on."""
        for name, values in self.memory.items():
            if values is not memory[name]:
                memory[name].copy_(values)
        self.stay_in(memory)

    def step(self, actions: Tensor) -> Step:
        """Takes one step."""
        draws = None
        if self._env.step_draws:
            keys, counters = of_steps(self._step_keys, self.episodes, self.elapsed)
            draws = uniform(keys, counters, self._env.step_draws)
        state, observation, reward, terminated = self._env.step(xp, self.state, actions, draws)
        success = self._env.success(xp, state)
        self.elapsed = self.elapsed + 1
        truncated = self.elapsed >= self._limit
        own = self._env.truncated(xp, state)
        if own is not None:
            truncated = truncated | own
        final, done = self._rows(observation), terminated | truncated
        following = final
        if not on_host(self._device) or bool(done.any()):  # looking waits for a GPU, and costs little on a CPU
            self.episodes = self.episodes + done
            fresh, first = self._first()
            state = {name: torch.where(_like(done, old), fresh[name], old) for name, old in state.items()}
            following = torch.where(done.unsqueeze(1), first, final)
            self.elapsed = torch.where(done, 0, self.elapsed)
        self.state = state
        return Step(following, reward, terminated, truncated, final, success)


def _like(done: Tensor, values: Tensor) -> Tensor:
    return done.view(-1, *(1,) * (values.dim() - 1))
