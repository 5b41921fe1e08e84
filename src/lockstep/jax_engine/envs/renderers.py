"""Draws states of JAX environments: with MuJoCo for Brax and Playground, with gymnax's own visualizer for gymnax."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

SIZE = (480, 640)


class MujocoRenderer:
    """Draws a MuJoCo model's states from its first camera, or from MuJoCo's free one if it has none."""

    def __init__(self, model: Any) -> None:
        mujoco: Any = importlib.import_module("mujoco")
        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        limits = (model.vis.global_.offheight, model.vis.global_.offwidth)
        self._renderer = mujoco.Renderer(model, *map(min, SIZE, limits))
        self._camera = 0 if model.ncam else -1

    def __call__(self, qpos: Any, qvel: Any, moved: Any) -> np.ndarray:
        """Draws the joints' positions and velocities, uint8 ``[height, width, 3]``.

        ``moved`` may have ``mocap_pos`` and ``mocap_quat``: poses of bodies that no force moves.
        """
        self._data.qpos[:], self._data.qvel[:] = np.asarray(qpos), np.asarray(qvel)
        if self._model.nmocap and hasattr(moved, "mocap_pos"):
            self._data.mocap_pos[:] = np.asarray(moved.mocap_pos)
            self._data.mocap_quat[:] = np.asarray(moved.mocap_quat)
        self._mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, camera=self._camera)
        return self._renderer.render()


class GymnaxRenderer:
    """Draws states with gymnax's ``Visualizer``, which uses matplotlib.

    Raises:
        ValueError: if gymnax has no picture of this environment.
    """

    def __init__(self, env: Any, params: Any, state: Any) -> None:
        from gymnax.visualize import Visualizer

        self._visualizer = Visualizer(env, params, [state])
        self._visualizer.init()
        if getattr(self._visualizer, "im", None) is None:
            raise ValueError("gymnax draws no picture of it")

    def __call__(self, state: Any) -> np.ndarray:
        """Draws a state, uint8 ``[height, width, 3]``."""
        drawn = self._visualizer
        drawn.state_seq = [state]
        drawn.update(0)
        drawn.ax.set_title(drawn.env.name)  # not the frame's number, which would always be the first
        canvas: Any = drawn.fig.canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
