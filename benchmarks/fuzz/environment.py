"""A Gymnasium environment whose spaces, ends and randomness are arguments: ``benchmarks.fuzz.environment:Drawn-v0``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

NUMBERS = 4
"""Numbers that an episode consists of."""


def _bytes(*shape: int, high: int = 255) -> spaces.Box:
    return spaces.Box(0, high, shape, np.uint8)


def _floats(limit: float, *shape: int, dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(-limit, limit, shape, dtype)


OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": _floats(3, 5),
    "one": _floats(1, 1),
    "unbounded": _floats(np.inf, 2, 3, dtype=np.float64),
    "whole": spaces.Box(-100, 100, (4,), np.int8),
    "image": _bytes(8, 8, 3),
    "channels-first": _bytes(2, 9, 9),
    "gray": _bytes(7, 7, high=15),
    "index": spaces.Discrete(7, start=-3),
    "indices": spaces.MultiDiscrete([3, 2, 4]),
    "bits": spaces.MultiBinary(6),
    "tuple": spaces.Tuple((spaces.Discrete(3), _floats(1, 2), spaces.MultiBinary([2, 3]))),
    "dict": spaces.Dict({"b": _floats(9, 3), "a": spaces.Discrete(4), "picture": _bytes(6, 6, 1)}),
    "nested": spaces.Dict(
        {
            "z": spaces.Tuple((spaces.Dict({"q": _floats(1, 1, dtype=np.float64)}), spaces.MultiDiscrete([2, 5]))),
            "y": spaces.Box(0, 1, (), np.float32),
        }
    ),
    "pictures": spaces.Dict({"v": _floats(9, 3), "one": _bytes(6, 6, 3), "two": _bytes(7, 7)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "two": spaces.Discrete(2),
    "from-two": spaces.Discrete(5, start=2),
    "indices": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
    "box": _floats(1, 2),
    "uneven": spaces.Box(np.array([-2, 0], np.float32), np.array([1, 5], np.float32)),
    "grid": _floats(1, 2, 2, dtype=np.float64),
    "unbounded": _floats(np.inf, 1),
}
LENGTHS: dict[str, tuple[int, int]] = {"one": (1, 2), "short": (1, 5), "mixed": (2, 20), "endless": (10**9, 10**9 + 1)}
"""Steps of an episode, from the first to below the second."""


class Drawn(gymnasium.Env[Any, Any]):
    """Four numbers that wander, shown as whatever space is wanted.

    Args:
        observation: a key of :data:`OBSERVATIONS`.
        action: a key of :data:`ACTIONS`.
        length: a key of :data:`LENGTHS`.
        truncates: whether every second episode is cut instead of ending.
        noise: how much of each step is drawn from ``np_random``.
        own_state: whether it saves and restores itself (``get_env_state``), and so may remember how many episodes there
            were, which begin otherwise then; else it is replayed.
        tells: of an episode's end, in ``info``: nothing, ``metrics`` or a ``score``.
        masks: whether ``info`` has an action mask.
        scale: of rewards.
        reads_clock: whether a step depends on the time, by which no run comes again: what the driver must notice.
    """

    def __init__(
        self,
        observation: str = "vector",
        action: str = "two",
        length: str = "mixed",
        truncates: bool = True,
        noise: float = 0.05,
        own_state: bool = False,
        tells: str | None = None,
        masks: bool = False,
        scale: float = 1.0,
        reads_clock: bool = False,
    ) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self._length, self._truncates, self._noise = LENGTHS[length], truncates, noise
        self._tells, self._masks, self._scale, self._reads_clock = tells, masks, scale, reads_clock
        self._numbers, self._step, self._steps, self._cut = np.zeros(NUMBERS), 0, 1, False
        self._own_state, self._episodes = own_state, 0
        if own_state:
            self.get_env_state: Callable[[], dict[str, Any]] = self._state
            self.set_env_state: Callable[[dict[str, Any]], None] = self._restore

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._numbers, self._step = self.np_random.normal(size=NUMBERS), 0
        if self._own_state:
            self._episodes += 1
            self._numbers *= 1 + 1 / self._episodes
        self._steps = int(self.np_random.integers(*self._length))
        self._cut = self._truncates and bool(self.np_random.integers(2))
        return self._shown(self.observation_space), self._info(False)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        push = float(np.sum(np.asarray(action, np.float64))) + (time.time() if self._reads_clock else 0.0)
        noise = self._noise * self.np_random.normal(size=NUMBERS) if self._noise else 0.0
        self._numbers = 0.9 * self._numbers + 0.1 * np.sin(push + np.arange(NUMBERS)) + noise
        self._step += 1
        over = self._step >= self._steps
        reward = float(self._numbers.sum() * self._scale)
        shown = self._shown(self.observation_space)
        return shown, reward, over and not self._cut, over and self._cut, self._info(over)

    def _info(self, over: bool) -> dict[str, Any]:
        info: dict[str, Any] = {}
        if self._masks:
            choices = int(spaces.flatdim(self.action_space))
            allowed = self._mixed() * np.arange(1, choices + 1) % 1 > 0.4
            allowed[int(self._mixed() * choices)] = True
            info["action_mask"] = allowed.astype(np.int8)
        if self._tells is not None and over:
            info["is_success"] = bool(self._numbers[0] > 0)
            if self._tells == "score":
                info["score"] = float(self._numbers[1])
            else:
                rare = {"rare": float(self._numbers[2])} if self._numbers[0] > 0.8 else {}
                info["metrics"] = {"x": float(self._numbers[1]), **rare}
        return info

    def _mixed(self) -> float:
        return float(np.abs(self._numbers).sum() * 1000 % 1)

    def _shown(self, space: spaces.Space[Any]) -> Any:
        """The numbers as an element of a space."""
        if isinstance(space, spaces.Dict):
            return {name: self._shown(part) for name, part in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._shown(part) for part in space.spaces)
        if isinstance(space, spaces.Discrete):
            return int(space.start + int(self._mixed() * space.n))
        if isinstance(space, spaces.MultiDiscrete):
            return np.array([int(self._mixed() * (i + 1) % 1 * n) for i, n in enumerate(space.nvec)])
        if isinstance(space, spaces.MultiBinary):
            return (np.abs(np.resize(self._numbers, space.shape)) * 10 % 1 > 0.5).astype(np.int8)
        assert isinstance(space, spaces.Box)
        numbers = np.resize(self._numbers, space.shape)
        if space.dtype == np.uint8:
            places = np.arange(1, 1 + numbers.size).reshape(space.shape)
            return (np.abs(numbers * places) * 37 % (int(space.high.max()) + 1)).astype(np.uint8)
        if space.dtype == np.int8:
            return np.clip(numbers * 20, -100, 100).astype(np.int8)
        return np.asarray(np.clip(numbers, space.low, space.high), space.dtype)

    # --- its own state --------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        counts = np.array([self._step, self._steps, self._cut, self._episodes])
        random = json.dumps(self.np_random.bit_generator.state).encode()
        return {"numbers": self._numbers.copy(), "counts": counts, "random": np.frombuffer(random, np.uint8)}

    def _restore(self, state: dict[str, Any]) -> None:
        self._numbers = np.array(state["numbers"])
        self._step, self._steps, cut, self._episodes = (int(n) for n in state["counts"])
        self._cut = bool(cut)
        self.np_random = np.random.default_rng(0)
        self.np_random.bit_generator.state = json.loads(np.asarray(state["random"], np.uint8).tobytes())


gymnasium.register("Drawn-v0", "benchmarks.fuzz.environment:Drawn")
