"""Pendulum-v1 on arrays: swing up a rod that hangs from a motor too weak to lift it, as Gymnasium simulates it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box

from lockstep.envs.arrays.arguments import finite_number
from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, side_by_side, wrap_angle


class Pendulum(ArrayEnvironment):
    """Task: turn a pendulum upright with little torque; an episode never terminates.

    The reward is ``-(theta² + 0.1 theta_dot² + 0.001 torque²)``, with ``theta`` in [-π, π].
    State, each float32 ``[n]``: ``theta`` (rad in [-π, π], 0 is upright) and ``theta_dot`` (rad/s).
    The observation is ``cos theta``, ``sin theta``, ``theta_dot``; the action is the torque (N m).
    Gymnasium lets ``theta`` grow turn by turn; here it is wrapped, because float32 would lose digits to whole turns.

    Args:
        g: gravity in m/s²; the name is Gymnasium's.

    Raises:
        ValueError: ``g`` is no finite number.
    """

    gymnasium_id = "Pendulum-v1"
    max_episode_steps = 200
    reset_draws = 2
    render_fps = 30

    mass: ClassVar[float] = 1.0
    """kg."""
    length: ClassVar[float] = 1.0
    """m."""
    max_torque: ClassVar[float] = 2.0
    """N m."""
    max_speed: ClassVar[float] = 8.0
    """rad/s."""
    time_step: ClassVar[float] = 0.05
    """s."""
    reset_angle: ClassVar[float] = math.pi
    """A reset draws ``theta`` from ± this, rad."""
    reset_speed: ClassVar[float] = 1.0
    """A reset draws ``theta_dot`` from ± this, rad/s."""

    def __init__(self, g: float = 10.0) -> None:
        self.gravity = finite_number("g", g)
        high = np.array([1.0, 1.0, self.max_speed], np.float32)
        self.observation_space = Box(-high, high, dtype=np.float32)
        self.action_space = Box(-self.max_torque, self.max_torque, (1,), np.float32)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode at an angle uniform in ±π rad and a speed uniform in ±1 rad/s."""
        state = {
            "theta": (2 * random[:, 0] - 1) * self.reset_angle,
            "theta_dot": (2 * random[:, 1] - 1) * self.reset_speed,
        }
        return state, _observe(xp, state)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one semi-implicit Euler step of 0.05 s; rewards the state before it and the clipped torque."""
        theta, theta_dot = wrap_angle(xp, state["theta"]), state["theta_dot"]
        torque = xp.clip(xp.asarray(action, dtype=theta.dtype)[:, 0], -self.max_torque, self.max_torque)
        reward = -(theta * theta + 0.1 * (theta_dot * theta_dot) + 0.001 * (torque * torque))
        by_gravity = 3 * self.gravity / (2 * self.length)
        by_torque = 3 / (self.mass * self.length**2)
        speed = theta_dot + (by_gravity * xp.sin(theta) + by_torque * torque) * self.time_step
        speed = xp.clip(speed, -self.max_speed, self.max_speed)
        moved = {"theta": wrap_angle(xp, theta + speed * self.time_step), "theta_dot": speed}
        return moved, _observe(xp, moved), reward, xp.zeros_like(theta, dtype=xp.bool)

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Puts Gymnasium's Pendulum into the state ``row``, without the arrow of a last torque."""
        renderer.state = np.array([row["theta"], row["theta_dot"]], np.float64)
        renderer.last_u = None


def _observe(xp: Any, state: State) -> Array:
    """Returns ``cos theta``, ``sin theta``, ``theta_dot``: float32 ``[n, 3]``."""
    return side_by_side(xp, (xp.cos(state["theta"]), xp.sin(state["theta"]), state["theta_dot"]))
