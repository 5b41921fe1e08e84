"""Stacks the newest observations of an array environment into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.envs.arrays.base import Array, ArrayEnvironment, State
from lockstep.envs.frames import stacked_space

FRAMES = "frames"


class FrameStack(ArrayEnvironment):
    """Stacks the newest ``count`` observations of an array environment: images along channels, vectors end to end.

    An episode begins with its first observation ``count`` times. The state holds the stack as ``frames``,
    ``[n, count, …]``, beside the environment's own state.
    """

    gymnasium_id = None

    def __init__(self, env: ArrayEnvironment, count: int) -> None:
        self._env, self._count, self._single = env, count, env.observation_space
        self.max_episode_steps, self.render_fps = env.max_episode_steps, env.render_fps  # pyright: ignore[reportAttributeAccessIssue]
        self.reset_draws, self.step_draws = env.reset_draws, env.step_draws  # pyright: ignore[reportAttributeAccessIssue]
        self.observation_space = stacked_space(self._single, count, None)  # pyright: ignore[reportAttributeAccessIssue]
        self.action_space = env.action_space

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode and fills the stack with its first observation."""
        state, observation = self._env.reset(xp, random)
        frames = xp.stack([observation] * self._count, axis=1)
        return {**state, FRAMES: frames}, self._join(xp, frames)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step and drops the oldest frame."""
        moved, observation, reward, terminated = self._env.step(xp, self._inner(state), action, random)
        frames = xp.concat((state[FRAMES][:, 1:], observation[:, None]), axis=1)
        return {**moved, FRAMES: frames}, self._join(xp, frames), reward, terminated

    def _join(self, xp: Any, frames: Array) -> Array:
        """Joins frames ``[n, count, …]`` along the last axis: channels of images, numbers of vectors."""
        return xp.concat([frames[:, index] for index in range(self._count)], axis=-1)

    def _inner(self, state: State) -> State:
        return {name: values for name, values in state.items() if name != FRAMES}

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """See :meth:`ArrayEnvironment.render`."""
        return self._env.render(self._inner(state), index)

    def text(self, state: State, index: int = 0) -> str | None:
        """See :meth:`ArrayEnvironment.text`."""
        return self._env.text(self._inner(state), index)

    def close(self) -> None:
        """See :meth:`ArrayEnvironment.close`."""
        self._env.close()

    def success(self, xp: Any, state: State) -> Array | None:
        """See :meth:`ArrayEnvironment.success`."""
        return self._env.success(xp, self._inner(state))

    def truncated(self, xp: Any, state: State) -> Array | None:
        """See :meth:`ArrayEnvironment.truncated`."""
        return self._env.truncated(xp, self._inner(state))

    def score(self, xp: Any, state: State) -> Array | None:
        """See :meth:`ArrayEnvironment.score`."""
        return self._env.score(xp, self._inner(state))
