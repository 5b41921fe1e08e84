"""Adapts a functional environment (:mod:`~lockstep.jax_engine.envs.functional`) to the engine as a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.envs.gymnasium.step_info import SUCCESS_KEYS
from lockstep.jax_engine.envs.default_params import default_params
from lockstep.jax_engine.envs.functional import (
    FINAL,
    LIMIT,
    TERMS,
    found,
    gets_keys,
    outcome,
    strong,
    tells_truncation,
    with_limit,
)
from lockstep.jax_engine.envs.functional_checks import check_functions
from lockstep.jax_engine.envs.gymnax_environment import resets_itself, without_autoreset
from lockstep.jax_engine.envs.protocol import Step, Tree
from lockstep.jax_engine.shards.keys import is_key, seed_key


class FunctionalAdapter:
    """Adapts one functional environment to the engine's :class:`JaxEnvironment`, as a batch.

    Keys are passed as arrays of bits (uint32), which every function of ``jax.random`` takes. Keys in a state are stored
    as bits too, so that a state consists of plain arrays.

    Args:
        env: an :class:`Environment`, or one of gymnax.
        params: its parameters; None: its ``default_params``.
        max_episode_steps: time limit; None: the environment's own, or that of ``params`` if it is less.
        name: id of the environment in errors; None: its class's name.

    Attributes:
        limit_note: what the user should know of ends at the time limit, or None.

    Raises:
        ValueError: if its functions don't fit its spaces, or can't be traced; the message is one line. Nothing is
            compiled to find out.
    """

    def __init__(
        self, env: Any, params: Any = None, max_episode_steps: int | None = None, name: str | None = None
    ) -> None:
        where = f"env: {type(env).__name__}" if name is None else f"env.id: {name}"
        name = name or type(env).__name__
        if getattr(env, "batched", False):
            raise ValueError(
                f"{where} is a whole batch of environments, and the engine makes its own; give the environment "
                "inside, and normalize.observations or normalize.returns instead of wrappers"
            )
        self._env = without_autoreset(env)
        self._params: Any = default_params(self._env) if params is None else params
        if max_episode_steps is not None and hasattr(self._params, LIMIT):
            self._params = with_limit(self._params, max_episode_steps, name)
        own = _whole(f"{where}: max_episode_steps", getattr(self._env, "max_episode_steps", None))
        limits = [x for x in (own, _limit_among(self._params)) if x]
        self.max_episode_steps: int | None = max_episode_steps or min(limits, default=None)
        self._autoreset = resets_itself(self._env)
        self._draws = gets_keys(self._env)
        self.observation_space, self.action_space, self._keys, shapes = check_functions(
            self._env, self._params, jax.random.key_data(seed_key(0)), where, FINAL if self._autoreset else ()
        )
        self.limit_note = None
        if hasattr(self._params, LIMIT) and not tells_truncation(shapes):
            self.limit_note = (
                f"{name}: its step doesn't tell {LIMIT} ({self.max_episode_steps}) from a real end, so that every end "
                "counts as one and none bootstraps; return info['truncated'], or six values"
            )

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.reset_random`: keys, uint32 ``[*shape, 2]``."""
        keys = jax.random.split(key, shape)
        return jax.random.key_data(keys) if is_key(keys) else keys

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.step_random`: keys, or None."""
        return self.reset_random(key, shape) if self._draws else None

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.reset`."""
        return jax.vmap(self._reset)(random)

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.step`."""
        return jax.vmap(self._step)(state, action, random)

    @property
    def can_render(self) -> bool:
        """Whether the environment has ``render(state, params)``."""
        return hasattr(self._env, "render")

    @property
    def render_fps(self) -> int | None:
        """Frames per second for which the environment's pictures are meant; None if it doesn't say."""
        return getattr(self._env, "render_fps", None)

    def render(self, state: Tree) -> np.ndarray:
        """Draws the first environment of a state, uint8 ``[height, width, 3]``."""
        return self._env.render(self._keys.typed(jax.tree.map(lambda x: x[0], state)), self._params)

    def _reset(self, key: Array) -> tuple[Tree, Tree]:
        observation, state = self._env.reset(key, self._params)
        return self._keys.plain(state), strong(observation)

    def _step(self, state: Tree, action: Array, key: Array | None) -> Step:
        values = self._env.step(key, self._keys.typed(state), action, self._params)
        result = outcome(values)
        observation = result.observation
        if self._autoreset:
            final = found(result.info, FINAL)
            observation = jax.tree.map(lambda last, next_: jnp.where(result.done, last, next_), final, observation)
        success = found(result.info, SUCCESS_KEYS)
        return Step(
            self._keys.plain(result.state),
            strong(observation),
            jnp.asarray(result.reward, jnp.float32),
            jnp.asarray(result.terminated, bool),
            jnp.asarray(result.truncated, bool),
            None if success is None else jnp.asarray(success) > 0.5,
            {term: jnp.asarray(value, jnp.float32) for term, value in result.info.get(TERMS, {}).items()},
        )


def _whole(what: str, limit: Any) -> int | None:
    """Returns a time limit as an int; raises a one-line ``ValueError`` if it is no whole number of steps."""
    if limit is None:
        return None
    number = np.asarray(limit)
    if number.shape or number.dtype.kind not in "iuf" or not np.isfinite(number) or number < 1 or number % 1:
        raise ValueError(f"{what}: {limit!r} must be a whole number, at least 1, or None for no limit")
    return int(number)


def _limit_among(params: Any) -> int | None:
    """Returns the time limit in the parameters, or None.

    Raises:
        ValueError: if the parameters are batched and have one per environment, or it is no whole number of steps; the
            message is one line.
    """
    limit: Any = getattr(params, LIMIT, None)
    if np.shape(limit):
        raise ValueError(
            f"env_params: {LIMIT} is of shape {np.shape(limit)}; one set of parameters is for all environments; draw "
            "what differs between episodes in reset, from its key"
        )
    return _whole(f"env_params: {LIMIT}", limit)
