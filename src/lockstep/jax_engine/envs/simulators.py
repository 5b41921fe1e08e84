"""Adapts array environments, and the simulators Brax and MuJoCo Playground, to functional environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array

from lockstep.envs.arrays import ArrayEnvironment
from lockstep.jax_engine.envs.functional import TERMS, Environment, EnvParams, Outcome, strong
from lockstep.jax_engine.envs.functional_checks import space_of
from lockstep.jax_engine.envs.protocol import Tree
from lockstep.jax_engine.shards.keys import seed_key

REWARD_PREFIXES = ("reward/", "reward_")
"""Prefixes of metrics that are parts of the reward."""
SUCCESS = "success"


class TimedEnvironment(Environment):
    """An environment whose state is ``{"env": …, "time": int32}``, with a time limit in its parameters."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    @property
    def default_params(self) -> EnvParams:
        """The time limit."""
        return EnvParams(max_steps_in_episode=self._limit)

    def _truncated(self, time: Array, params: EnvParams | None) -> Array:
        return time >= (params or self.default_params).max_steps_in_episode


class SingleArrayEnvironment(TimedEnvironment):
    """Adapts a batched array environment to a single functional one."""

    def __init__(self, env: ArrayEnvironment) -> None:
        super().__init__(env.max_episode_steps)
        self._env = env
        self.step_draws = env.step_draws > 0

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Environment.reset`."""
        random = jax.random.uniform(key, (1, self._env.reset_draws), jnp.float32)
        state, observation = self._env.reset(jnp, random)
        return observation[0], {"env": jax.tree.map(lambda x: x[0], state), "time": jnp.zeros((), jnp.int32)}

    def step(self, key: Array | None, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Environment.step`."""
        random = None if key is None else jax.random.uniform(key, (1, self._env.step_draws), jnp.float32)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], state["env"])
        moved, observation, reward, terminated = self._env.step(jnp, batch, jnp.asarray(action)[None], random)
        time = state["time"] + 1
        success = self._env.success(jnp, moved)
        info = {} if success is None else {SUCCESS: success[0]}
        following = {"env": jax.tree.map(lambda x: x[0], moved), "time": time}
        truncated, own = self._truncated(time, params), self._env.truncated(jnp, moved)
        if own is not None:
            truncated = truncated | own[0]
        return Outcome(observation[0], following, reward[0], terminated[0], truncated, info).values()

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.observation_space`."""
        return self._env.observation_space

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.action_space`."""
        return self._env.action_space


class SimulatedEnvironment(TimedEnvironment):
    """Adapts an unwrapped environment in Brax's form: ``reset(key) -> State``, ``step(State, action) -> State``.

    A State has ``obs``, ``reward``, ``done``, ``metrics`` and ``info``. Actions lie in [-1, 1], as in all of Brax's and
    Playground's learners. Metrics called ``reward_…`` or ``reward/…`` become reward terms, and ``success`` becomes the
    success.
    """

    step_draws = False

    def __init__(self, env: Any, limit: int) -> None:
        super().__init__(limit)
        self._env, self._pictures = env, None

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Environment.reset`."""
        state = strong(self._env.reset(key))
        return state.obs, {"env": state, "time": jnp.zeros((), jnp.int32)}

    def step(self, key: Array | None, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Environment.step`."""
        before, time = state["env"], state["time"] + 1
        kinds = jax.tree.map(lambda x: x.dtype, before)
        # the step writes into the dicts of the state that it is given, so it gets a copy
        stepped = self._env.step(jax.tree.map(lambda x: x, before), action)
        after = jax.tree.map(lambda x, dtype: jnp.asarray(x, dtype), stepped, kinds)
        ended = after.done.astype(bool)
        own = after.info["truncation"].astype(bool) if "truncation" in after.info else jnp.zeros_like(ended)
        info: dict[str, Any] = {TERMS: reward_terms(after.metrics)}
        info |= {SUCCESS: after.metrics[SUCCESS] > 0} if SUCCESS in after.metrics else {}
        truncated = (own & ended) | self._truncated(time, params)
        following = {"env": after, "time": time}
        return Outcome(after.obs, following, after.reward, ended & ~own, truncated, info).values()

    def render(self, state: Tree, params: Any = None) -> np.ndarray:
        """Draws a state, uint8 ``[height, width, 3]``; needs one of MuJoCo's graphics libraries, but no screen."""
        if self._pictures is None:
            from lockstep.jax_engine.envs.renderers import MujocoRenderer

            self._pictures = MujocoRenderer(self._env.sys.mj_model if hasattr(self._env, "sys") else self._env.mj_model)
        inside = state["env"]
        if hasattr(inside, "pipeline_state"):
            physics = inside.pipeline_state
            return self._pictures(physics.q, physics.qd, physics)
        return self._pictures(inside.data.qpos, inside.data.qvel, inside.data)

    @property
    def render_fps(self) -> int:
        """The number of steps in a second of simulated time."""
        return max(1, round(1.0 / float(self._env.dt)))

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.observation_space`."""
        key = jax.random.key_data(seed_key(0))
        return _unbounded(jax.eval_shape(lambda k: self._env.reset(k).obs, key))

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.action_space`."""
        return space_of(spaces.Box(-1.0, 1.0, (int(self._env.action_size),), np.float32))


def _unbounded(seen: Any) -> gymnasium.Space:
    if isinstance(seen, Mapping):
        return spaces.Dict({name: _unbounded(part) for name, part in seen.items()})
    return spaces.Box(-np.inf, np.inf, seen.shape, np.float32)


def reward_terms(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the parts of the reward among a simulator's metrics, by their names without the prefix."""
    return {
        name[len(prefix) :]: value
        for prefix in REWARD_PREFIXES
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
