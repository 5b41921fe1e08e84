"""Pictures of environments that JAX steps: MuJoCo's renderer for Brax and Playground, gymnax's own for gymnax."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import numpy as np

from lockstep.config import EnvConfig
from lockstep.jax_engine.environments import make_environment
from lockstep.jax_engine.host_vector import reset_draws, step_draws

SIZE = (480, 640)
MUJOCO_FAMILIES = ("brax/", "playground/")
DEFAULT_FPS = 30


class MujocoPictures:
    """Pictures of a MuJoCo model's states, from its first camera, else from MuJoCo's free one.

    Args:
        model: ``mujoco.MjModel``.
    """

    def __init__(self, model: Any) -> None:
        mujoco: Any = importlib.import_module("mujoco")
        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        limits = (model.vis.global_.offheight, model.vis.global_.offwidth)
        self._renderer = mujoco.Renderer(model, *map(min, SIZE, limits))
        self._camera = 0 if model.ncam else -1

    def __call__(self, qpos: Any, qvel: Any, moved: Any) -> np.ndarray:
        """The picture, uint8 ``[height, width, 3]``.

        Args:
            qpos: positions, ``qvel`` velocities, of the model's joints.
            qvel: see ``qpos``.
            moved: what may have ``mocap_pos`` and ``mocap_quat``: places of bodies that nothing pushes.
        """
        self._data.qpos[:], self._data.qvel[:] = np.asarray(qpos), np.asarray(qvel)
        if self._model.nmocap and hasattr(moved, "mocap_pos"):
            self._data.mocap_pos[:] = np.asarray(moved.mocap_pos)
            self._data.mocap_quat[:] = np.asarray(moved.mocap_quat)
        self._mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, camera=self._camera)
        return self._renderer.render()


class GymnaxPictures:
    """Pictures by gymnax's ``Visualizer``, which draws with matplotlib.

    Args:
        env: of gymnax.
        params: its parameters.
        state: the first one.

    Raises:
        ValueError: gymnax has no picture of this environment.
    """

    def __init__(self, env: Any, params: Any, state: Any) -> None:
        from gymnax.visualize import Visualizer

        self._visualizer = Visualizer(env, params, [state])
        self._visualizer.init()
        if getattr(self._visualizer, "im", None) is None:
            raise ValueError("gymnax draws no picture of it")

    def __call__(self, state: Any) -> np.ndarray:
        """The picture, uint8 ``[height, width, 3]``."""
        drawn = self._visualizer
        drawn.state_seq = [state]
        drawn.update(0)
        drawn.ax.set_title(drawn.env.name)  # instead of the number of the frame, which is always the first
        canvas: Any = drawn.fig.canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


class DrawnEnvironment:
    """One environment as a loop takes it that steps and draws it; its k-th evaluation episode begins as in ``eval``.

    Args:
        config: which environment.
        mode: ``rgb_array``.

    Raises:
        ValueError: it has no picture, or a window is asked for; one line.
    """

    def __init__(self, config: EnvConfig, mode: str) -> None:
        if mode != "rgb_array":
            raise ValueError(
                f"{config.id} is stepped by JAX and can't be shown in a window; --video out.mp4 records it"
            )
        self._env = env = make_environment(config)
        if not getattr(env, "can_render", False):
            raise ValueError(
                f"{config.id} can't be drawn: it has no render(state, params), which gives a picture uint8 "
                "[height, width, 3]"
            )
        self.metadata = {"render_fps": getattr(env, "render_fps", None) or DEFAULT_FPS}
        entry = "mujoco" if config.id.startswith(MUJOCO_FAMILIES) else ""
        self.spec = SimpleNamespace(id=config.id, entry_point=entry)
        self._dtype = np.float32 if isinstance(env.action_space, gymnasium.spaces.Box) else np.int32
        self._reset = jax.jit(lambda seed: env.reset(reset_draws(env, seed)))
        self._step = jax.jit(lambda state, action, seed, t: env.step(state, action, step_draws(env, seed, t)))
        self._seed, self._elapsed, self._state = np.zeros(1, np.uint32), 0, None

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of a seed; its observation and an empty info."""
        self._seed, self._elapsed = np.array([seed], np.uint32), 0
        self._state, observation = self._reset(self._seed)
        return _first(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, as Gymnasium has it."""
        at = np.array([self._elapsed], np.int32)
        step = self._step(self._state, np.asarray(action, self._dtype)[None], self._seed, at)
        self._state, self._elapsed = step.state, self._elapsed + 1
        limit = self._env.max_episode_steps
        truncated = bool(step.truncated[0]) or (limit is not None and self._elapsed >= limit)
        info = {} if step.success is None else {"is_success": bool(step.success[0])}
        return _first(step.observation), float(step.reward[0]), bool(step.terminated[0]), truncated, info

    def render(self) -> np.ndarray:
        """The picture of the state, uint8 ``[height, width, 3]``."""
        env: Any = self._env
        return np.asarray(env.render(self._state))

    def close(self) -> None:
        """Nothing to let go."""


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x[0]), tree)
