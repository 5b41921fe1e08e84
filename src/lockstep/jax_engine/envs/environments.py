"""Makes the environment that the compiled program steps from a config, and adapts array environments."""

from __future__ import annotations

import copy
import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.config.run import EnvConfig
from lockstep.core.user_code.errors import error_line
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS, ArrayEnvironment
from lockstep.envs.arrays.base import render_modes
from lockstep.envs.description import stepped_as_arrays
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.protocol import JaxEnvironment, Step, Tree
from lockstep.jax_engine.envs.registry import make
from lockstep.jax_engine.envs.wrappers import wrap


class ArrayEnvironmentAdapter:
    """Adapts an array environment to ``jax.numpy``; its random numbers are float32, uniform in [0, 1)."""

    cheap_reset = can_render = True

    def __init__(self, env: ArrayEnvironment, max_episode_steps: int | None = None) -> None:
        self._env = env
        self.observation_space: gymnasium.Space = env.observation_space
        self.action_space: gymnasium.Space = env.action_space
        self.max_episode_steps: int | None = max_episode_steps or env.max_episode_steps
        self.render_fps, self.render_modes = env.render_fps, render_modes(type(env))

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
        truncated = self._env.truncated(jnp, state)
        if truncated is None:
            truncated = jnp.zeros_like(terminated)
        success, score = self._env.success(jnp, state), self._env.score(jnp, state)
        return Step(state, observation, reward, terminated, truncated, success, score=score)

    def render(self, state: Tree) -> np.ndarray:
        """Draws the first environment of a state."""
        return self._env.render(state)

    def text(self, state: Tree) -> str | None:
        """Writes the first environment of a state as lines of text; None if it has no such picture."""
        return self._env.text(state)

    def close(self) -> None:
        """Closes what :meth:`render` opened."""
        self._env.close()


def is_jax_environment(config: EnvConfig) -> bool:
    """Returns whether the environment is stepped inside the compiled program; else it is stepped on the host."""
    return config.jax_only or stepped_as_arrays(config)


def make_environment(config: EnvConfig) -> JaxEnvironment:
    """Makes the environment of a config, in the wrappers that it asks for.

    Raises:
        ValueError: if there is none of this id, it can't be made, its functions don't fit its spaces, or a package
            isn't installed; the message is one line.
    """
    return _made(config.model_dump_json())


@functools.lru_cache(maxsize=8)
def _made(settings: str) -> JaxEnvironment:
    """Makes the environment of a config in JSON.

    Cached, because it is pure and tracing a simulator for the checks is slow.
    """
    config = EnvConfig.model_validate_json(settings)
    kind = ARRAY_ENVIRONMENTS.get(config.id)
    if kind is not None:
        try:
            array_env = kind(**config.kwargs)
        except Exception as error:
            raise ValueError(f"env.id: {config.id} can't be made: {error_line(error)}") from error
        env: JaxEnvironment = ArrayEnvironmentAdapter(array_env, config.max_episode_steps)
    elif not config.jax_only:
        raise ValueError(f"env.id: {config.id} is stepped on the host, not by JAX")
    elif "/" not in config.id and ":" not in config.id:
        # a plain id is Gymnasium's environment, which ours of the same name must not replace unasked
        raise ValueError(
            f"env.id: {config.id} with env.backend jax: give lockstep/…, gymnax/…, brax/…, playground/… or a class of "
            "your own as 'module:Class'; without env.backend it is stepped on the host"
        )
    else:
        functional, params = make(config.id, **copy.deepcopy(config.kwargs))
        env = FunctionalAdapter(functional, params, config.max_episode_steps, config.id)
    return wrap(config, env)


def environment_spaces(config: EnvConfig) -> tuple[gymnasium.Space, gymnasium.Space, int | None]:
    """Returns observation space, action space and time limit of a config's environment.

    See :func:`make_environment`.
    """
    env = make_environment(config)
    return env.observation_space, env.action_space, env.max_episode_steps


def can_draw(config: EnvConfig) -> bool:
    """Returns whether a config's environment has pictures; see :func:`make_environment`."""
    return bool(getattr(make_environment(config), "can_render", False))
