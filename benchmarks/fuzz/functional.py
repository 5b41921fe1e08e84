"""An environment written in JAX whose spaces and ends are arguments: ``benchmarks.fuzz.functional:Drawn``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "image": spaces.Box(0, 255, (6, 6, 2), np.uint8),
    "index": spaces.Discrete(5),
    "dict": spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (3,), np.float32), "b": spaces.Discrete(3)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "three": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "indices": spaces.MultiDiscrete([2, 3]),
}


class Drawn:
    """Three numbers that wander for 1 to 14 steps.

    Args:
        observation: a key of :data:`OBSERVATIONS`.
        action: a key of :data:`ACTIONS`.
        truncates: whether every second episode is cut instead of ending.
    """

    def __init__(self, observation: str = "vector", action: str = "three", truncates: bool = False) -> None:
        self._observation, self._action, self._truncates = observation, action, truncates

    def observation_space(self, params: Any) -> spaces.Space[Any]:
        return OBSERVATIONS[self._observation]

    def action_space(self, params: Any) -> spaces.Space[Any]:
        return ACTIONS[self._action]

    def reset(self, key: jax.Array, params: Any) -> tuple[Any, Any]:
        numbers, length = jax.random.split(key)
        state = jax.random.normal(numbers, (3,)), jax.random.randint(length, (), 1, 15), jnp.zeros((), jnp.int32)
        return self._shown(state[0]), state

    def step(self, key: jax.Array, state: Any, action: Any, params: Any) -> tuple[Any, ...]:
        numbers, length, taken = state
        push = jnp.sum(jnp.asarray(action, jnp.float32))
        numbers = 0.9 * numbers + 0.1 * jnp.sin(push + jnp.arange(3.0)) + 0.05 * jax.random.normal(key, (3,))
        over = taken + 1 >= length
        info = {"success": numbers[0] > 0, "reward_terms": {"p": numbers[1]}}
        told = self._shown(numbers), (numbers, length, taken + 1), numbers.sum()
        if self._truncates:
            return *told, over & (length % 2 == 0), over & (length % 2 == 1), info
        return *told, over, info

    def _shown(self, numbers: jax.Array) -> Any:
        mixed = jnp.abs(numbers).sum()
        if self._observation == "image":
            return (mixed * 37 % 255).astype(jnp.uint8) + jnp.arange(72, dtype=jnp.uint8).reshape(6, 6, 2)
        if self._observation == "index":
            return (mixed * 10 % 5).astype(jnp.int32)
        if self._observation == "dict":
            return {"a": numbers, "b": (mixed * 10 % 3).astype(jnp.int32)}
        return numbers
