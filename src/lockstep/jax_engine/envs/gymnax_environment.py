"""Adapts environments of any version of gymnax to functional ones, without their autoreset."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.jax_engine.envs.default_params import that_may_be_called
from lockstep.jax_engine.envs.functional import LIMIT, Environment, Outcome, with_limit
from lockstep.jax_engine.envs.functional_checks import space_of
from lockstep.jax_engine.envs.protocol import Tree
from lockstep.jax_engine.shards.keys import seed_key

CLASSIC_CONTROL = ("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0")


class GymnaxEnvironment(Environment):
    """A gymnax environment of any version, without its own autoreset.

    gymnax 1.x tells truncation from termination. In 0.0.x ``done`` is both; there an episode is terminated if
    ``is_terminal`` says so with the time limit lifted. Spaces get the dtype of the actual observations, and ``images``
    (MinAtar's boards of zeros and ones) become bytes.
    """

    def __init__(self, env: Any, images: bool = False) -> None:
        self._env, self._images, self._pictures = env, images, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def default_params(self) -> Any:
        """The parameters of gymnax; they may be called, and return themselves."""
        return that_may_be_called(self._env.default_params)

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Environment.reset`."""
        observation, state = self._env.reset_env(key, self._given(params))
        return self._seen(observation), state

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Environment.step`."""
        params = self._given(params)
        observation, state, reward, done, info = self._env.step_env(key, state, action, params)
        done = jnp.asarray(done, bool)
        if hasattr(self._env, "is_truncated"):
            ended, truncated = done, jnp.asarray(self._env.is_truncated(state, params), bool)
        elif hasattr(params, LIMIT) and hasattr(self._env, "is_terminal"):
            endless = with_limit(params, jnp.iinfo(jnp.int32).max, type(self._env).__name__)
            ended = jnp.asarray(self._env.is_terminal(state, endless), bool) & done
            truncated = done & ~ended
        else:
            ended, truncated = done, jnp.zeros_like(done)
        return Outcome(
            self._seen(observation), state, jnp.asarray(reward, jnp.float32), ended, truncated, info
        ).values()

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.observation_space`."""
        params = self._given(params)
        space = space_of(self._env.observation_space(params))
        if isinstance(space, gymnasium.spaces.Box):
            seen, _ = jax.eval_shape(lambda key: self.reset(key, params), jax.random.key_data(seed_key(0)))
            space = gymnasium.spaces.Box(
                space.low.astype(seen.dtype), space.high.astype(seen.dtype), seen.shape, seen.dtype.type
            )
        return space

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.action_space`."""
        return space_of(self._env.action_space(self._given(params)))

    def render(self, state: Tree, params: Any = None) -> np.ndarray:
        """Draws a state with gymnax's matplotlib visualizer."""
        if self._pictures is None:
            from lockstep.jax_engine.envs.renderers import GymnaxRenderer

            self._pictures = GymnaxRenderer(self._env, self._given(params), state)
        return self._pictures(state)

    @property
    def render_fps(self) -> int:
        """The frame rate at which gymnax plays them."""
        return 20 if self._env.name in CLASSIC_CONTROL else 10

    def _given(self, params: Any) -> Any:
        return self._env.default_params if params is None else params

    def _seen(self, observation: Tree) -> Tree:
        return observation.astype(jnp.uint8) if self._images else observation


def without_autoreset(env: Any) -> Any:
    """Removes the autoreset from a gymnax environment; returns any other, even a wrapper around gymnax, unchanged.

    Raises:
        ValueError: a subclass overrides ``step`` or ``reset``, which the engine doesn't call; one line.
    """
    kind = type(env)
    if not hasattr(kind, "step_env"):
        return env
    for name in ("step", "reset"):
        own, called = (_depth(kind, method) for method in (name, f"{name}_env"))
        if own < called:
            raise ValueError(
                f"env: {kind.__name__} overrides {name}, and the engine, which resets by itself, calls {name}_env; "
                f"override {name}_env instead"
            )
    return GymnaxEnvironment(env)


def _depth(kind: type, method: str) -> int:
    """Returns how many bases lie between a class and its definition of a method; -1 if there is none."""
    return next((depth for depth, base in enumerate(kind.__mro__) if method in vars(base)), -1)


def resets_itself(env: Any) -> bool:
    """Returns whether ``step`` begins the next episode: as ``autoreset`` says, else as gymnax's wrappers do."""
    said = getattr(env, "autoreset", None)
    return hasattr(env, "step_env") if said is None else bool(said)
