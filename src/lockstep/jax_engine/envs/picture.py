"""Adapts one environment that JAX steps to Gymnasium's `step` and `render`, so that it can be filmed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import numpy as np

from lockstep.config.run import EnvConfig
from lockstep.envs.arrays.pictures.window import Window
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.envs.for_host import reset_draws, step_draws

MUJOCO_FAMILIES = ("brax/", "playground/")
DEFAULT_FPS = 30


class DrawnEnvironment:
    """Steps and draws one environment with Gymnasium's interface; an evaluation's k-th episode begins as in ``eval``.

    It is stepped on the device that ``device`` names: ``cpu``, else the first of JAX's default kind. Array environments
    can also be shown in a window (mode ``human``), and some as text (``ansi``).

    Raises:
        ValueError: if it has no picture, or can't be shown in a window that is asked for; the message is one line.
    """

    def __init__(self, config: EnvConfig, mode: str, device: str = "cpu") -> None:
        self._env = env = make_environment(config)
        if mode not in getattr(env, "render_modes", ["rgb_array"]):
            raise ValueError(
                f"{config.id} is stepped by JAX and can't be shown in a window; --video out.mp4 records it"
            )
        if not getattr(env, "can_render", False):
            raise ValueError(
                f"{config.id} can't be drawn: it has no render(state, params), which gives a picture uint8 "
                "[height, width, 3]"
            )
        fps = getattr(env, "render_fps", None) or DEFAULT_FPS
        self.render_mode, self.metadata, self._window = mode, {"render_fps": fps}, Window(config.id, fps)
        entry = "mujoco" if config.id.startswith(MUJOCO_FAMILIES) else ""
        self.spec = SimpleNamespace(id=config.id, entry_point=entry)
        self._dtype = np.float32 if isinstance(env.action_space, gymnasium.spaces.Box) else np.int32
        self._device = jax.local_devices(backend="cpu" if device == "cpu" else None)[0]
        self._reset = jax.jit(lambda seed: env.reset(reset_draws(env, seed)))
        self._step = jax.jit(lambda state, action, seed, t: env.step(state, action, step_draws(env, seed, t)))
        self._seed, self._elapsed, self._state = np.zeros(1, np.uint32), 0, None

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begins the episode of a seed; returns its observation and an empty info."""
        self._seed, self._elapsed = np.array([seed], np.uint32), 0
        with jax.default_device(self._device):
            self._state, observation = self._reset(self._seed)
        self._show()
        return _first(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes one step; returns Gymnasium's five values."""
        at = np.array([self._elapsed], np.int32)
        with jax.default_device(self._device):
            step = self._step(self._state, np.asarray(action, self._dtype)[None], self._seed, at)
        self._state, self._elapsed = step.state, self._elapsed + 1
        limit = self._env.max_episode_steps
        truncated = bool(step.truncated[0]) or (limit is not None and self._elapsed >= limit)
        info: dict[str, Any] = {} if step.success is None else {"is_success": bool(step.success[0])}
        info |= {} if step.score is None else {"score": int(step.score[0])}
        self._show()
        return _first(step.observation), float(step.reward[0]), bool(step.terminated[0]), truncated, info

    def render(self) -> Any:
        """Draws the state, uint8 ``[height, width, 3]``, or writes it as text."""
        env: Any = self._env
        return env.text(self._state) if self.render_mode == "ansi" else np.asarray(env.render(self._state))

    def _show(self) -> None:
        if self.render_mode == "human":
            env: Any = self._env
            self._window.show(np.asarray(env.render(self._state)))

    def close(self) -> None:
        """Closes what rendering opened."""
        self._window.close()
        getattr(self._env, "close", lambda: None)()


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x[0]), tree)
