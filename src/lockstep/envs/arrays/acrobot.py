"""Acrobot-v1 on arrays: swing up a chain of two links whose only motor is in the joint between them.

Sutton (1996), "Generalization in reinforcement learning: successful examples using sparse coarse coding", Advances in
Neural Information Processing Systems 8; equations of motion as in Sutton and Barto's book and as Gymnasium simulates
them (its ``book_or_nips = "book"``).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, side_by_side, wrap_angle

_NAMES = ("theta1", "theta2", "theta1_dot", "theta2_dot")


class Acrobot(ArrayEnvironment):
    """Task: turn the joint between two links with -1, 0 or 1 N m (0, 1, 2) until the chain's free end is high enough.

    An episode terminates when the free end is a link's length above the fixed one. The reward is 0 in that step and -1
    in all others.
    State, each float32 ``[n]``: angle ``theta1`` of the first link (rad in [-π, π], 0 hangs down), angle ``theta2`` of
    the second link relative to the first (rad in [-π, π]), their speeds ``theta1_dot`` and ``theta2_dot`` (rad/s).
    The observation is cosine and sine of both angles, and both speeds.
    """

    gymnasium_id = "Acrobot-v1"
    max_episode_steps = 500
    reset_draws = 4
    render_fps = 15

    gravity: float = 9.8
    """m/s²."""
    link_mass: ClassVar[float] = 1.0
    """Mass of each link, kg."""
    link_length: ClassVar[float] = 1.0
    """Length of each link, m."""
    mass_centre: ClassVar[float] = 0.5
    """Distance of a link's centre of mass along the link, m."""
    link_inertia: ClassVar[float] = 1.0
    """Moment of inertia of each link about its centre of mass, kg m²."""
    max_speeds: ClassVar[tuple[float, float]] = (4 * math.pi, 9 * math.pi)
    """Greatest speeds of the first and the second angle, rad/s."""
    time_step: ClassVar[float] = 0.2
    """s."""
    reset_range: ClassVar[float] = 0.1
    """A reset draws every component of the state uniformly from ± this."""

    def __init__(self) -> None:
        high = np.array([1.0, 1.0, 1.0, 1.0, *self.max_speeds], np.float32)
        self.observation_space = Box(-high, high, dtype=np.float32)
        self.action_space = Discrete(3)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode hanging down almost at rest: all four components uniform in ±0.1."""
        state = {name: (2 * random[:, column] - 1) * self.reset_range for column, name in enumerate(_NAMES)}
        return state, _observe(xp, state)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step of 0.2 s by the classical Runge-Kutta method, then wraps angles and clips speeds."""
        theta1, theta2, speed1, speed2 = self._integrated(xp, tuple(state[name] for name in _NAMES), action)
        moved = {
            "theta1": wrap_angle(xp, theta1),
            "theta2": wrap_angle(xp, theta2),
            "theta1_dot": xp.clip(speed1, -self.max_speeds[0], self.max_speeds[0]),
            "theta2_dot": xp.clip(speed2, -self.max_speeds[1], self.max_speeds[1]),
        }
        height = -xp.cos(moved["theta1"]) - xp.cos(moved["theta1"] + moved["theta2"])
        terminated = height > self.link_length
        reward = xp.where(terminated, xp.zeros_like(height), -xp.ones_like(height))
        return moved, _observe(xp, moved), reward, terminated

    def _integrated(self, xp: Any, start: tuple[Array, ...], action: Array) -> list[Array]:
        """Returns the four components after a step, neither wrapped nor clipped."""
        torque = xp.astype(action, start[0].dtype) - 1
        step, slopes = self.time_step, [self._derivatives(xp, start, torque)]
        for share in (step / 2, step / 2, step):
            there = tuple(x + share * slope for x, slope in zip(start, slopes[-1], strict=True))
            slopes.append(self._derivatives(xp, there, torque))
        return [x + step / 6 * (a + 2 * b + 2 * c + d) for x, a, b, c, d in zip(start, *slopes, strict=True)]

    def _derivatives(self, xp: Any, at: tuple[Array, ...], torque: Array) -> tuple[Array, ...]:
        """Returns the derivatives of the four components, per second; d1, d2, phi1, phi2 are named as in the book."""
        theta1, theta2, speed1, speed2 = at
        mass, length, centre, inertia = self.link_mass, self.link_length, self.mass_centre, self.link_inertia
        cos2, sin2, coupling = xp.cos(theta2), xp.sin(theta2), mass * length * centre
        d1 = mass * centre**2 + mass * (length**2 + centre**2) + 2 * inertia + 2 * coupling * cos2
        d2 = mass * centre**2 + inertia + coupling * cos2
        phi2 = mass * centre * self.gravity * xp.sin(theta1 + theta2)
        phi1 = (
            phi2
            + mass * (centre + length) * self.gravity * xp.sin(theta1)
            - coupling * sin2 * speed2 * (speed2 + 2 * speed1)
        )
        ratio = d2 / d1
        turning = torque + ratio * phi1 - coupling * (speed1 * speed1) * sin2 - phi2
        acceleration2 = turning / (mass * centre**2 + inertia - d2 * ratio)
        return speed1, speed2, -(d2 * acceleration2 + phi1) / d1, acceleration2

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Puts Gymnasium's Acrobot into the state ``row``."""
        renderer.state = np.array([row[name] for name in _NAMES], np.float64)


def _observe(xp: Any, state: State) -> Array:
    """Returns cosine and sine of both angles, and both speeds: float32 ``[n, 6]``."""
    theta1, theta2, speed1, speed2 = (state[name] for name in _NAMES)
    return side_by_side(xp, (xp.cos(theta1), xp.sin(theta1), xp.cos(theta2), xp.sin(theta2), speed1, speed2))
