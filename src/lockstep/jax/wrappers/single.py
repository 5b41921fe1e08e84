"""Wraps single functional environments, see :mod:`lockstep.jax.wrappers`."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array

from lockstep.core.spaces import bounded_within
from lockstep.envs.frames import join_frames, stacked_space
from lockstep.jax.config import whole_number
from lockstep.jax_engine.envs.functional import FINAL, Outcome, found, outcome
from lockstep.jax_engine.envs.functional_checks import space_of
from lockstep.jax_engine.envs.gymnax_environment import resets_itself, without_autoreset
from lockstep.jax_engine.envs.protocol import Tree

FINAL_OBS = FINAL[0]


class Wrapper:
    """Wraps an environment and changes nothing; attributes that it lacks are the inner environment's."""

    batched = False

    def __init__(self, env: Any) -> None:
        self._env = without_autoreset(env)
        if getattr(self._env, "batched", False) and not self.batched:
            raise ValueError(
                f"{type(self).__name__}: it works on one environment and was given a batch of them; put it inside "
                "VmapWrapper"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def autoreset(self) -> bool:
        """Whether a step begins the next episode by itself."""
        return resets_itself(self._env)

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """Begins an episode; returns observation and state."""
        return self._env.reset(key, params)

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """Takes a step; returns ``(obs, state, reward, done, info)``."""
        return self._inner(key, state, action, params).values()

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """Returns the space of one environment's observations."""
        return _space(self._env.observation_space, params)

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """Returns the space of one environment's actions."""
        return _space(self._env.action_space, params)

    def _inner(self, key: Array, state: Tree, action: Array, params: Any) -> Outcome:
        return outcome(self._env.step(key, state, action, params))


def innermost(env: Any) -> Any:
    """Returns the environment inside all wrappers."""
    while isinstance(env, Wrapper):
        env = env._env
    return env


def _space(given: Any, params: Any) -> gymnasium.Space:
    return space_of(given(params) if callable(given) else given)


class AutoResetWrapper(Wrapper):
    """Begins the next episode in the step that ends one; ``info["final_obs"]`` is the observation after that step.

    A truncated episode bootstraps from the value of ``final_obs``, a terminated one from 0.

    Raises:
        ValueError: the environment resets by itself already.
    """

    autoreset = True  # pyright: ignore[reportAssignmentType]
    step_draws = True

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        if resets_itself(self._env):
            raise ValueError(f"AutoResetWrapper: {type(env).__name__} resets by itself already; leave the wrapper out")

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`; if an episode ends, observation and state are the next episode's first ones."""
        step_key, reset_key = jax.random.split(key)
        result = self._inner(step_key, state, action, params)
        first, fresh = self._env.reset(reset_key, params)
        observation = _where(result.done, first, result.observation)
        info = result.info | {FINAL_OBS: result.observation}
        following = _where(result.done, fresh, result.state)
        return result._replace(observation=observation, state=following, info=info).values()


class EpisodeStatisticsWrapper(Wrapper):
    """Adds return and length of episodes to ``info``.

    ``returned_episode`` (bool) says whether an episode ended in this step. ``returned_episode_returns`` (float32) and
    ``returned_episode_lengths`` (int32) are those of the last episode that ended, 0 before the first.
    """

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Wrapper.reset`."""
        observation, state = self._env.reset(key, params)
        zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return observation, {"env": state, "return": zero, "length": none, "last_return": zero, "last_length": none}

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`."""
        result = self._inner(key, state["env"], action, params)
        total, length = state["return"] + jnp.asarray(result.reward, jnp.float32), state["length"] + 1
        done = result.done
        last = {
            "last_return": jnp.where(done, total, state["last_return"]),
            "last_length": jnp.where(done, length, state["last_length"]),
        }
        live = {"return": jnp.where(done, 0.0, total), "length": jnp.where(done, 0, length)}
        info = result.info | {
            "returned_episode": done,
            "returned_episode_returns": last["last_return"],
            "returned_episode_lengths": last["last_length"],
        }
        return result._replace(state={"env": result.state, **live, **last}, info=info).values()


class FrameStackWrapper(Wrapper):
    """Stacks the newest ``count`` observations: images along channels, vectors end to end.

    An episode begins with its first observation ``count`` times; ``final_obs`` is stacked too.

    Raises:
        ValueError: ``count`` isn't a whole number, at least 1.
    """

    def __init__(self, env: Any, count: int) -> None:
        super().__init__(env)
        self._count = whole_number("FrameStackWrapper: count", count, 1)

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Wrapper.observation_space`."""
        return stacked_space(super().observation_space(params), self._count, None)

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Wrapper.reset`."""
        observation, state = self._env.reset(key, params)
        frames = self._repeated(observation)
        return self._join(frames, params), {"env": state, "frames": frames}

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`."""
        result = self._inner(key, state["env"], action, params)
        final, info = found(result.info, FINAL), result.info
        newest = result.observation if final is None else final
        frames = jax.tree.map(lambda old, new: jnp.concatenate((old[1:], new[None])), state["frames"], newest)
        if final is not None:
            info = info | {FINAL_OBS: self._join(frames, params)}
            frames = _where(result.done, self._repeated(result.observation), frames)
        following = {"env": result.state, "frames": frames}
        return result._replace(observation=self._join(frames, params), state=following, info=info).values()

    def _repeated(self, observation: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], self._count, 0), observation)

    def _join(self, frames: Tree, params: Any) -> Tree:
        return join_frames(jnp, super().observation_space(params), frames, None)


class _ActionWrapper(Wrapper):
    def _bounds(self, params: Any) -> spaces.Box:
        space = super().action_space(params)
        if not isinstance(space, spaces.Box):
            raise ValueError(f"{type(self).__name__}: actions are {space}, which have no bounds; leave it out")
        return space


class ClipActionWrapper(_ActionWrapper):
    """Clips continuous actions to their bounds; the action space has no bounds.

    Raises:
        ValueError: (when stepped or asked for its action space) actions aren't continuous.
    """

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Wrapper.action_space`."""
        return spaces.Box(-np.inf, np.inf, self._bounds(params).shape, np.float32)

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`."""
        space = self._bounds(params)
        return super().step(key, state, jnp.clip(action, space.low, space.high), params)


class RescaleActionWrapper(_ActionWrapper):
    """Stretches continuous actions from between ``low`` and ``high`` to the bounds of the action space.

    Raises:
        ValueError: ``low`` isn't below ``high``; or, when stepped or asked for its action space: there are no (finite)
            bounds.
    """

    def __init__(self, env: Any, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(env)
        if not low < high:
            raise ValueError(f"RescaleActionWrapper: low {low} must be below high {high}")
        self._low, self._high = low, high

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Wrapper.action_space`."""
        return spaces.Box(self._low, self._high, self._finite(params).shape, np.float32)

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`."""
        space = self._finite(params)
        share = (action - self._low) / (self._high - self._low)
        return super().step(key, state, jnp.asarray(space.low + share * (space.high - space.low)), params)

    def _finite(self, params: Any) -> spaces.Box:
        space = self._bounds(params)
        if not bounded_within(space.low, space.high).all():
            raise ValueError(f"RescaleActionWrapper: {space} has no finite bounds to stretch actions to; leave it out")
        return space


def _where(done: Array, first: Tree, second: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(done, x, y), first, second)
