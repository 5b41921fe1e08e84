"""Defines the interface of environments inside the compiled program.

Everything is batched over ``n`` environments, pure, and traceable by ``jax.jit``. The engine resets environments whose
episode ended (in the same step, keeping the last observation), counts time limits and episodes, and holds the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.shards.keys import is_key

Tree = Any
"""A pytree of arrays; an observation is an array, or a (nested) dict or tuple of arrays like its space."""


class Step(NamedTuple):
    """The result of a step of ``n`` environments, before any reset.

    Attributes:
        state: pytree of arrays ``[n, …]``, of the same structure, shapes and dtypes as the previous state.
        observation: of the state that the step led to, even if the episode ended: ``[n, …]`` as the space says.
        reward: float32 ``[n]``.
        terminated: bool ``[n]``.
        truncated: bool ``[n]``, by the environment itself; the engine adds ``max_episode_steps``.
        success: whether each task is solved, bool ``[n]``; None if the environment doesn't say.
        terms: named parts of the reward, float32 ``[n]`` each; may be empty.
        score: points of each episode so far, ``[n]``; None if there are none.
    """

    state: Tree
    observation: Tree
    reward: Array
    terminated: Array
    truncated: Array
    success: Array | None = None
    terms: dict[str, Array] = {}  # noqa: RUF012 (never written to)
    score: Array | None = None


class JaxEnvironment(Protocol):
    """A batch of ``n`` environments as pure functions.

    It may have ``cheap_reset = True`` if a reset costs next to nothing. Then a reset is computed at every step, and not
    only at those where an episode ends.

    Attributes:
        max_episode_steps: steps after which the engine truncates an episode, or None.
    """

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    max_episode_steps: int | None

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """Draws the random numbers of ``shape`` resets in one batched draw: pytree of arrays ``[*shape, …]``."""
        ...

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """Draws the random numbers of ``shape`` steps in one batched draw, arrays ``[*shape, …]``, or returns None."""
        ...

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """Begins an episode in ``n`` environments from draws ``[n, …]``; returns their state and observation."""
        ...

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """Takes one step of ``n`` environments.

        Args:
            state: from the last reset or step.
            action: as the space says: int32 ``[n]`` (Discrete) or ``[n, *shape]``, or float32 ``[n, *shape]`` within
                the bounds.
            random: from :meth:`step_random`, ``[n, …]``, or None if that is None.
        """
        ...


def pick(where: Array, yes: Any, no: Any) -> Any:
    """Selects leaves of one tree or the other by row, by ``where``, bool ``[n]``."""

    def of(a: Array, b: Array) -> Array:
        if is_key(a):
            data = of(jax.random.key_data(a), jax.random.key_data(b))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
        return jnp.where(where.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(of, yes, no)
