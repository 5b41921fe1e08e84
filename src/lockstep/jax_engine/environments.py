"""Environments that are traced into the compiled program: what the engine needs of one, and array environments as such.

Everything is batched over ``n`` environments, pure, and traceable by ``jax.jit``. The engine itself resets environments
whose episode ended (in the same step, keeping what it saw last), counts time limits and episodes, and holds the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
import jax.numpy as jnp
from jax import Array

from lockstep.config import EnvConfig
from lockstep.envs.arrays import ArrayEnvironment
from lockstep.envs.description import array_environment, stepped_as_arrays

Tree = Any
"""A pytree of arrays; observations are an array, or a (nested) dict or tuple of arrays as their space is."""


class Step(NamedTuple):
    """What a step of ``n`` environments gave, before any reset.

    Attributes:
        state: pytree of arrays ``[n, …]``, of the same structure, shapes and dtypes as the state before.
        observation: what the step led to, also where the episode ended: ``[n, …]`` as the space says.
        reward: float32 ``[n]``.
        terminated: bool ``[n]``.
        truncated: bool ``[n]``, the environment's own; the engine adds ``max_episode_steps``.
        success: whether each task is solved, bool ``[n]``; None where there is no such notion.
        terms: named parts of the reward, float32 ``[n]`` each; may be empty.
    """

    state: Tree
    observation: Tree
    reward: Array
    terminated: Array
    truncated: Array
    success: Array | None = None
    terms: dict[str, Array] = {}  # noqa: RUF012 (never written to)


class JaxEnvironment(Protocol):
    """A batch of ``n`` environments as pure functions.

    Attributes:
        observation_space: of one environment.
        action_space: of one environment.
        max_episode_steps: steps after which the engine truncates an episode, or None.
    """

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    max_episode_steps: int | None

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """What ``shape`` resets draw, in one batched draw: pytree of arrays ``[*shape, …]``."""
        ...

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """What ``shape`` steps draw, in one batched draw: pytree of arrays ``[*shape, …]``; None: nothing."""
        ...

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """Begin an episode in ``n`` environments: their state and observation.

        Args:
            random: of :meth:`reset_random`, ``[n, …]``.
        """
        ...

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """One step of ``n`` environments.

        Args:
            state: of the last reset or step.
            action: as the space says: int32 ``[n]`` (Discrete) or ``[n, *shape]``, or float32 ``[n, *shape]`` within
                the bounds.
            random: of :meth:`step_random`, ``[n, …]``, or None where that is None.
        """
        ...


class ArrayEnvironmentAdapter:
    """An array environment on ``jax.numpy``; its random numbers are float32, uniform in [0, 1).

    Args:
        env: of :mod:`lockstep.envs.arrays`.
        max_episode_steps: time limit; None: the environment's own.
    """

    def __init__(self, env: ArrayEnvironment, max_episode_steps: int | None = None) -> None:
        self._env = env
        self.observation_space: gymnasium.Space = env.observation_space
        self.action_space: gymnasium.Space = env.action_space
        self.max_episode_steps: int | None = max_episode_steps or env.max_episode_steps

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.reset_random`."""
        return jax.random.uniform(key, (*shape, self._env.reset_draws), jnp.float32)

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.step_random`."""
        if not self._env.step_draws:
            return None
        return jax.random.uniform(key, (*shape, self._env.step_draws), jnp.float32)

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`JaxEnvironment.reset`."""
        return self._env.reset(jnp, random)

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`JaxEnvironment.step`."""
        state, observation, reward, terminated = self._env.step(jnp, state, action, random)
        truncated = jnp.zeros_like(terminated)
        return Step(state, observation, reward, terminated, truncated, self._env.success(jnp, state))


def is_jax_environment(config: EnvConfig) -> bool:
    """Whether it is stepped inside the compiled program; else the engine steps it on the host."""
    return stepped_as_arrays(config)


def make_environment(config: EnvConfig) -> JaxEnvironment:
    """The environment of a config.

    Raises:
        ValueError: there is none of this id; one line.
    """
    kind = array_environment(config.id)
    if kind is None:
        raise ValueError(f"env.id: {config.id} is none that JAX can step")
    return ArrayEnvironmentAdapter(kind(**config.kwargs), config.max_episode_steps)


def environment_spaces(config: EnvConfig) -> tuple[gymnasium.Space, gymnasium.Space, int | None]:
    """Observation space, action space and time limit of :func:`make_environment`'s environment; errors as there."""
    env = make_environment(config)
    return env.observation_space, env.action_space, env.max_episode_steps
