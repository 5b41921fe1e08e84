"""Watches an environment's first steps for observations outside its space and for global random generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from lockstep.core.errors import one_line
from lockstep.core.process import say
from lockstep.envs.gymnasium.step_info import as_array

WATCHED_STEPS = 200
"""Steps of the first environment whose observations are compared with its space."""

OWN_STATISTICS = {
    gymnasium.wrappers.NormalizeObservation: "--normalize.observations",
    gymnasium.wrappers.NormalizeReward: "--normalize.returns",
}


def own_statistics(env: gymnasium.Env) -> str | None:
    """Returns a message if a wrapper normalises by statistics of one environment, with the run's option; else None."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        for kind, option in OWN_STATISTICS.items():
            if isinstance(inner, kind):
                return (
                    f"it is wrapped in {kind.__name__}, whose statistics are of each environment alone and in no "
                    f"checkpoint, so that an evaluation begins without them; leave it out, and give {option}"
                )
        inner = inner.env
    return None


# --- spaces -----------------------------------------------------------------------------------------------------------


def outside(space: gymnasium.Space, observation: Any, name: str = "") -> str | None:
    """Says how an observation that isn't in its space differs from it: by a key, its shape, its dtype or a value.

    Returns None for a NaN, which ``envs.numbers`` reports with the environment that gave it.
    """
    what = f"the observation{f' under {name!r}' if name else ''}"
    if isinstance(space, gymnasium.spaces.Dict) and isinstance(observation, Mapping):
        missing, more = set(space.spaces) - set(observation), set(observation) - set(space.spaces)
        if missing or more:
            return f"{what} has other keys than its space: {sorted(missing | more, key=str)}"
        if not isinstance(observation, dict):
            return f"{what} is of type {type(observation).__name__}, its space says dict"
        return _first_outside(((key, part, observation[key]) for key, part in space.spaces.items()), name)
    if isinstance(space, gymnasium.spaces.Tuple) and isinstance(observation, tuple | list):
        if len(observation) != len(space.spaces):
            return f"{what} has {len(observation)} parts, its space says {len(space.spaces)}"
        return _first_outside(zip(range(len(observation)), space.spaces, observation, strict=True), name)
    array = as_array(observation)
    if array is not None and array.shape != space.shape and space.shape is not None:
        return f"{what} has shape {array.shape}, its space says {space.shape}"
    if array is not None and isinstance(space, gymnasium.spaces.Box):
        if not np.can_cast(array.dtype, space.dtype):
            return f"{what} is of dtype {array.dtype}, its space says {space.dtype}"
        if np.isnan(array).any():
            return None
        below, above = array < space.low, array > space.high
        if (below | above).any():
            at = tuple(int(i) for i in np.argwhere(below | above)[0])
            low, high = space.low[at], space.high[at]
            return f"{what} is {array[at]:g} at {list(at)}, its space says {low:g} to {high:g}"
    return f"{what} is {one_line(observation)[:80]}, which isn't in {space}"


def _first_outside(parts: Iterable[tuple[object, gymnasium.Space, Any]], name: str) -> str | None:
    """Says which part of a Dict or Tuple differs from its space, and how; skips parts that only have a NaN."""
    wrong = ((key, space, part) for key, space, part in parts if not space.contains(part))
    said = (outside(space, part, f"{name}/{key}".lstrip("/")) for key, space, part in wrong)
    return next((text for text in said if text is not None), None)


# --- generators -------------------------------------------------------------------------------------------------------


class GlobalGenerators:
    """Detects whether an environment draws from, or seeds, the random generators that a whole process shares.

    Those are NumPy's, Python's and PyTorch's on the CPU, not those of its devices. An environment's own generator, such
    as ``self.np_random``, isn't one of them.
    """

    def __init__(self) -> None:
        self._before: list[tuple[str, object]] = []
        self._moved: dict[str, None] = {}

    def __enter__(self) -> None:
        self._before = _states()

    def __exit__(self, *exc: object) -> None:
        after = dict(_states())
        self._moved |= {name: None for name, state in self._before if after[name] != state}

    def said(self) -> str | None:
        """Returns a message on generators used in the blocks so far, with consequence and remedy; None if none were."""
        if not self._moved:
            return None
        own = "a torch.Generator of its own that reset seeds, or from " if "torch" in self._moved else ""
        return (
            f"it draws from or seeds the global generator of {' and of '.join(self._moved)}, which all environments of "
            "a process share, so that what it gives may depend on those beside it; draw every random number from "
            f"{own}self.np_random, which super().reset(seed=seed) seeds"
        )


def _states() -> list[tuple[str, object]]:
    states: list[tuple[str, object]] = [("numpy.random", _comparable(np.random.get_state(legacy=False)))]
    states.append(("random", random.getstate()))
    torch_state = getattr(sys.modules.get("torch"), "get_rng_state", None)  # None if nobody has imported it
    if torch_state is not None:
        states.append(("torch", torch_state().numpy().tobytes()))
    return states


def _comparable(state: Any) -> object:
    """Returns the state of a bit generator of any kind with arrays as bytes, so that it can be compared."""
    if isinstance(state, Mapping):
        return [(name, _comparable(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


# --- a run's first environment ----------------------------------------------------------------------------------------


class WatchedEnv:
    """Steps the run's first environment and watches its first steps and resets.

    It warns once if an observation isn't in its space, and once if global generators are used.

    Attributes:
        left: steps and resets still to watch; 0: there is nothing more to warn of.
    """

    def __init__(self, env: gymnasium.Env, space: gymnasium.Space, name: str) -> None:
        self._env, self._space, self._name = env, space, name
        self._generators: GlobalGenerators | None = GlobalGenerators()
        self._compares = True
        self.left = WATCHED_STEPS

    def reset(self, **arguments: Any) -> tuple[Any, Any]:
        """See ``gymnasium.Env.reset``."""
        with self._generators or contextlib.nullcontext():
            observation, info = self._env.reset(**arguments)
        self.look(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """See ``gymnasium.Env.step``."""
        if not self.left:
            return self._env.step(action)
        with self._generators or contextlib.nullcontext():
            observation, reward, terminated, truncated, info = self._env.step(action)
        self.look(observation, reward)
        return observation, reward, terminated, truncated, info

    def look(self, observation: Any, reward: Any = 0.0) -> None:
        """Checks an observation, a reward and the generators; a check that fails to run becomes a warning."""
        self.left -= 1
        if self._compares and (said := self._compared(observation, reward)) is not None:
            self._compares = False
            self._warn(said)
        if self._generators is not None and (said := self._generators.said()) is not None:
            self._generators = None
            self._warn(said)
        if not self._compares and self._generators is None:
            self.left = 0

    def _compared(self, observation: Any, reward: Any) -> str | None:
        try:
            array = as_array(reward)
            if array is not None and array.ndim:
                return f"the reward returned by step() must be a number, and is an array of shape {array.shape}"
            return None if self._space.contains(observation) else outside(self._space, observation)
        except Exception as error:  # of a space or an observation of the user's own
            text = one_line(error)
            return f"the observation can't be compared with its space: {type(error).__name__}: {text}"

    def _warn(self, said: str) -> None:
        say(f"lockstep: warning: {self._name}: {said}")
