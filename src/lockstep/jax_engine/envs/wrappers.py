"""Frame skip, sticky actions and frame stack inside the compiled program, equal to the host's wrappers.

Each wraps a batch of environments as another batch. From inside to outside: frame skip, sticky actions, frame stack.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.config.run import EnvConfig
from lockstep.envs.frames import join_frames, stacked_space
from lockstep.jax_engine.envs.protocol import JaxEnvironment, Step, Tree


class BatchWrapper:
    """Wraps a batch of environments without changing it; the inner state is the entry ``"env"`` of the state."""

    def __init__(self, env: JaxEnvironment) -> None:
        self._env = env
        self.observation_space: gymnasium.Space = env.observation_space
        self.action_space: gymnasium.Space = env.action_space
        self.max_episode_steps: int | None = env.max_episode_steps

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.reset_random`."""
        return self._env.reset_random(key, shape)

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.step_random`."""
        return self._env.step_random(key, shape)

    @property
    def can_render(self) -> bool:
        """Whether the environment inside can be drawn."""
        return getattr(self._env, "can_render", False)

    @property
    def render_fps(self) -> int | None:
        """Frames per second for which its pictures are meant; None if it doesn't say."""
        return getattr(self._env, "render_fps", None)

    def render(self, state: Tree) -> np.ndarray:
        """Draws the first environment of a state; every wrapper keeps the inner state as ``"env"``."""
        env: Any = self._env
        return env.render(state["env"])

    @property
    def render_modes(self) -> list[str]:
        """The modes in which the environment inside can be shown."""
        return getattr(self._env, "render_modes", ["rgb_array"])

    def text(self, state: Tree) -> str | None:
        """Writes the first environment of a state as text, if :attr:`render_modes` has ``ansi``."""
        env: Any = self._env
        return env.text(state["env"])

    def close(self) -> None:
        """Closes what :meth:`render` opened."""
        getattr(self._env, "close", lambda: None)()


class FrameSkip(BatchWrapper):
    """Repeats every action ``skip`` times or until the episode ends; sums rewards and returns the last observation.

    The time limit counts inner steps and is kept here. The engine's limit is the same in outer steps.
    """

    def __init__(self, env: JaxEnvironment, skip: int) -> None:
        super().__init__(env)
        self._skip, self._limit = skip, env.max_episode_steps
        self.max_episode_steps = None if self._limit is None else -(-self._limit // skip)

    @property
    def render_fps(self) -> int | None:
        """See :attr:`BatchWrapper.render_fps`; there is one picture for every ``skip`` steps."""
        inside = super().render_fps
        return None if inside is None else max(1, round(inside / self._skip))

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.step_random`: ``[*shape, skip, …]``."""
        return self._env.step_random(key, (*shape, self._skip))

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`JaxEnvironment.reset`."""
        state, observation = self._env.reset(random)
        return {"env": state, "elapsed": jnp.zeros(_count(observation), jnp.int32)}, observation

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`JaxEnvironment.step`."""
        draws = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), random)
        first = jax.tree.map(lambda x: x[0], draws)
        shapes = jax.eval_shape(self._env.step, state["env"], action, first)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)._replace(state=state["env"])

        def once(carry: tuple[Step, Array], draw: Tree) -> tuple[tuple[Step, Array], None]:
            so_far, elapsed = carry
            new = self._env.step(so_far.state, action, draw)
            over = so_far.terminated | so_far.truncated
            count = elapsed + 1
            if self._limit is not None:
                new = new._replace(truncated=new.truncated | (count >= self._limit))
            total = jax.tree.map(jnp.add, (so_far.reward, so_far.terms), (new.reward, new.terms))
            new = new._replace(reward=total[0], terms=total[1])
            kept = jax.tree.map(lambda old, x: jnp.where(_like(over, x), old, x), so_far, new)
            return (kept, jnp.where(over, elapsed, count)), None

        # a loop, so that a simulator's large step is compiled only once
        (last, elapsed), _ = jax.lax.scan(once, (empty, state["elapsed"]), draws, self._skip)
        return last._replace(state={"env": last.state, "elapsed": elapsed})


class StickyActions(BatchWrapper):
    """Repeats the last action with some probability (Machado et al. 2018), but never at an episode's first step."""

    def __init__(self, env: JaxEnvironment, probability: float) -> None:
        super().__init__(env)
        self._probability = probability

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`JaxEnvironment.step_random`."""
        inside, own = jax.random.split(key)
        return {"env": self._env.step_random(inside, shape), "sticks": jax.random.uniform(own, shape, jnp.float32)}

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`JaxEnvironment.reset`."""
        state, observation = self._env.reset(random)
        count, space = _count(observation), self.action_space
        dtype = jnp.float32 if isinstance(space, gymnasium.spaces.Box) else jnp.int32
        last = jnp.zeros((count, *(space.shape or ())), dtype)
        return {"env": state, "last_action": last, "started": jnp.zeros(count, bool)}, observation

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`JaxEnvironment.step`."""
        sticks = state["started"] & (random["sticks"] < self._probability)
        taken = jnp.where(_like(sticks, action), state["last_action"], action)
        step = self._env.step(state["env"], taken, random["env"])
        started = jnp.ones_like(state["started"])
        return step._replace(state={"env": step.state, "last_action": taken, "started": started})


class FrameStack(BatchWrapper):
    """Stacks the newest ``count`` observations: images along their channels, vectors into one vector.

    An episode begins with ``count`` copies of its first observation. Of the entry ``mask`` only the newest is kept.
    """

    def __init__(self, env: JaxEnvironment, count: int, mask: str | None = None) -> None:
        super().__init__(env)
        self._single, self._count, self._mask = env.observation_space, count, mask
        self.observation_space = stacked_space(self._single, count, mask)

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`JaxEnvironment.reset`."""
        state, observation = self._env.reset(random)
        frames = jax.tree.map(lambda x: jnp.repeat(x[:, None], self._count, 1), observation)
        return {"env": state, "frames": frames}, self._join(frames)

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`JaxEnvironment.step`."""
        step = self._env.step(state["env"], action, random)
        frames = jax.tree.map(
            lambda old, new: jnp.concatenate((old[:, 1:], new[:, None]), 1), state["frames"], step.observation
        )
        return step._replace(state={"env": step.state, "frames": frames}, observation=self._join(frames))

    def _join(self, frames: Tree) -> Tree:
        return jax.vmap(lambda each: join_frames(jnp, self._single, each, self._mask))(frames)


def wrap(config: EnvConfig, env: JaxEnvironment) -> JaxEnvironment:
    """Wraps an environment in the wrappers that its config asks for."""
    if config.frame_skip > 1:
        env = FrameSkip(env, config.frame_skip)
    if config.sticky_actions:
        env = StickyActions(env, config.sticky_actions)
    if config.frame_stack > 1:
        env = FrameStack(env, config.frame_stack, config.action_mask)
    return env


def _count(observation: Tree) -> int:
    return jax.tree.leaves(observation)[0].shape[0]


def _like(flags: Array, values: Array) -> Array:
    return flags.reshape(-1, *(1,) * (values.ndim - 1))
