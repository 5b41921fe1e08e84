"""Wraps environments as a config asks, with Gymnasium's own wrappers where it has them.

From inside to outside: MiniGrid's indices; Atari's preprocessing and lives, or frame skip; sticky actions; frame stack.
Every random choice follows the reset's seed. None of them changes rewards, except that frame skips add them up.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from lockstep.config.run import EnvConfig
from lockstep.envs.frames import join_frames, stacked_space, with_plain_texts
from lockstep.envs.gymnasium.atari import AtariLives, AtariScreens, reload_quickly
from lockstep.envs.gymnasium.minigrid import with_cell_indices
from lockstep.envs.gymnasium.step_info import number


class FrameSkip(gymnasium.Wrapper):
    """Repeats every action ``skip`` times, or until the episode ends; adds up rewards, returns the last observation.

    It lowers ``render_fps``, because a picture is taken every ``skip`` steps.
    """

    def __init__(self, env: gymnasium.Env, skip: int) -> None:
        super().__init__(env)
        self._skip = skip
        if fps := env.metadata.get("render_fps"):
            self.metadata = {**env.metadata, "render_fps": max(1, round(fps / skip))}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``."""
        total = 0.0
        for _ in range(self._skip - 1):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += number(reward)
            if terminated or truncated:
                return observation, total, terminated, truncated, info
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, total + number(reward), terminated, truncated, info


class KeyedStickyAction(wrappers.StickyAction):
    """Gymnasium's sticky actions, drawn from their own generator, which each seeded reset seeds."""

    _generator = np.random.default_rng(0)

    @property
    def np_random(self) -> np.random.Generator:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the generator that decides whether an action sticks."""
        return self._generator

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        if seed is not None:
            self._generator = np.random.Generator(np.random.Philox(key=seed))
        return super().reset(seed=seed, options=options)


FORGETTING = (wrappers.TimeLimit, wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, wrappers.RecordEpisodeStatistics)
"""Gymnasium's wrappers that keep nothing but a count of steps, which is set, and what nobody reads."""
OF_A_FUNCTION = (wrappers.TransformAction, wrappers.TransformObservation, wrappers.TransformReward)
"""Transformations by a user's function, which may keep state."""
HOOKS = ("get_env_state", "set_env_state")


class StackFrames(gymnasium.Wrapper):
    """Joins the last ``count`` observations by :func:`join_frames`; a reset fills the stack with its observation."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        self._single = env.observation_space
        self._frames: deque[np.ndarray] = deque(maxlen=count)
        self.observation_space = stacked_space(self._single, count, None)

    def _joined(self, observation: Any) -> np.ndarray:
        self._frames.append(np.array(observation))  # a copy: some environments reuse their buffers
        return join_frames(np, self._single, np.stack(self._frames), None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._frames.extend([np.array(observation)] * (self._frames.maxlen or 1))
        return self._joined(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(observation), reward, terminated, truncated, info


class StackParts(gymnasium.ObservationWrapper):
    """Joins frames of :class:`gymnasium.wrappers.FrameStackObservation` by :func:`join_frames`, for any space."""

    def __init__(self, env: gymnasium.Env, single: gymnasium.Space, mask: str | None) -> None:
        super().__init__(env)
        self._single, self._mask = single, mask
        self.observation_space = stacked_space(single, self.get_wrapper_attr("stack_size"), mask)

    def observation(self, observation: Any) -> Any:
        """Joins a stack of observations into one."""
        return join_frames(np, self._single, observation, self._mask)


def stateful(config: EnvConfig) -> bool:
    """Returns whether wrappers keep anything from step to step, which state hooks of the environment can't restore."""
    return config.frame_stack > 1 or config.frame_skip > 1 or bool(config.sticky_actions) or config.atari.enabled


def vouches_for_state(env: gymnasium.Env) -> Any:
    """Returns the object whose ``get_env_state()`` and ``set_env_state(arrays)`` hold a whole environment, or None.

    It is the outermost that has both, if no wrapper around it may keep state itself. A user's wrapper may. The wrappers
    of ``gymnasium.make`` and Gymnasium's plain transformations don't.
    """
    while isinstance(env, gymnasium.Wrapper):
        if all(hasattr(type(env), name) for name in HOOKS):  # its own, not the inner environment's
            return env
        if not _forgets(env):
            return None
        env = env.env
    return env if all(hasattr(env, name) for name in HOOKS) else None


def _forgets(env: gymnasium.Wrapper) -> bool:
    ours = type(env).__module__.startswith("lockstep.")  # :func:`stateful` asks about those of a config
    transforms = type(env).__module__.startswith("gymnasium.wrappers.transform_") and type(env) not in OF_A_FUNCTION
    return ours or transforms or type(env) in FORGETTING


def wrap(config: EnvConfig, env: gymnasium.Env) -> gymnasium.Env:
    """Puts the environment into the wrappers of its config.

    Raises:
        ValueError: a wrapper doesn't fit it; one line.
    """
    env = with_cell_indices(env)
    if config.atari.enabled:
        env = _atari(config, env)
    elif config.frame_skip > 1:
        env = FrameSkip(env, config.frame_skip)
    if config.sticky_actions and not config.atari.enabled:
        env = KeyedStickyAction(env, config.sticky_actions)
    if config.frame_stack > 1:
        single = env.observation_space
        if isinstance(single, gymnasium.spaces.Box):
            return StackFrames(env, config.frame_stack)
        # some environments reuse their buffers
        copied = wrappers.TransformObservation(env, deepcopy, with_plain_texts(single))
        env = StackParts(wrappers.FrameStackObservation(copied, config.frame_stack), single, config.action_mask)
    return env


def _atari(config: EnvConfig, env: gymnasium.Env) -> gymnasium.Env:
    atari = config.atari
    if not hasattr(env.unwrapped, "ale"):
        raise ValueError(f"env.atari: {config.id} is no ALE game (their ids begin with ALE/); leave it out")
    if importlib.util.find_spec("cv2") is None:
        raise ValueError("env.atari: needs opencv, which isn't installed; pip install 'lockstep-rl[atari]'")
    reload_quickly(env.unwrapped)
    env = AtariScreens(
        env,
        noop_max=atari.noop_max,
        frame_skip=atari.frame_skip,
        screen_size=atari.screen_size,
        grayscale_obs=atari.grayscale,
    )
    return AtariLives(env, atari.fire_reset, atari.terminal_on_life_loss)
