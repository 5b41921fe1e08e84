"""CartPole-v1 on arrays: the cart and pole of Barto, Sutton and Anderson (1983) as Gymnasium simulates them.

"Neuronlike adaptive elements that can solve difficult learning control problems", IEEE Transactions on Systems, Man,
and Cybernetics SMC-13(5); equations of motion after Florian (2007), "Correct equations for the dynamics of the
cart-pole system", without friction.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, numbers, side_by_side


class CartPole(ArrayEnvironment):
    """Task: push a cart left (0) or right (1) to keep its pole upright; the reward is 1 in every step, also the last.

    State, each float32 ``[n]``: ``x`` (m), ``x_dot`` (m/s), ``theta`` (rad, 0 is upright), ``theta_dot`` (rad/s).
    The observation is these four in this order.
    """

    gymnasium_id = "CartPole-v1"
    max_episode_steps = 500
    reset_draws = 4
    render_fps = 50

    gravity: float = 9.8
    """m/s²."""
    cart_mass: ClassVar[float] = 1.0
    """kg."""
    pole_mass: ClassVar[float] = 0.1
    """kg."""
    half_pole_length: ClassVar[float] = 0.5
    """m."""
    force: ClassVar[float] = 10.0
    """N."""
    time_step: ClassVar[float] = 0.02
    """s."""
    x_limit: ClassVar[float] = 2.4
    """m from the centre, beyond which an episode terminates."""
    theta_limit: ClassVar[float] = math.radians(12)
    """rad from upright, beyond which an episode terminates."""
    reset_range: ClassVar[float] = 0.05
    """A reset draws every component of the state uniformly from ± this."""

    def __init__(self) -> None:
        high = np.array([2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf], np.float32)
        self.observation_space = Box(-high, high, dtype=np.float32)
        self.action_space = Discrete(2)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode almost upright and at rest: all four components uniform in ±0.05."""
        drawn = (2 * random - 1) * self.reset_range
        names = ("x", "x_dot", "theta", "theta_dot")
        state = {name: drawn[:, column] for column, name in enumerate(names)}
        return state, side_by_side(xp, tuple(state.values()))

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one explicit Euler step of 0.02 s."""
        x, x_dot, theta, theta_dot = state["x"], state["x_dot"], state["theta"], state["theta_dot"]
        time_step, x_limit, theta_limit = numbers(x, self.time_step, self.x_limit, self.theta_limit)
        push = xp.full_like(x, self.force)
        x_acc, theta_acc = self._accelerations(xp, theta, theta_dot, xp.where(action == 1, push, -push))
        moved = {
            "x": x + time_step * x_dot,
            "x_dot": x_dot + time_step * x_acc,
            "theta": theta + time_step * theta_dot,
            "theta_dot": theta_dot + time_step * theta_acc,
        }
        terminated = (xp.abs(moved["x"]) > x_limit) | (xp.abs(moved["theta"]) > theta_limit)
        return moved, side_by_side(xp, tuple(moved.values())), xp.ones_like(x), terminated

    def _accelerations(self, xp: Any, theta: Array, theta_dot: Array, force: Array) -> tuple[Array, Array]:
        """Returns the accelerations of cart (m/s²) and pole angle (rad/s²): Florian (2007), without friction."""
        total_mass, mass_length, half_length, pole_mass, gravity, four_thirds = numbers(
            theta,
            self.cart_mass + self.pole_mass,
            self.pole_mass * self.half_pole_length,
            self.half_pole_length,
            self.pole_mass,
            self.gravity,
            4 / 3,
        )
        cos, sin = xp.cos(theta), xp.sin(theta)
        pushed = (force + mass_length * (theta_dot * theta_dot) * sin) / total_mass
        inertia = half_length * (four_thirds - pole_mass * (cos * cos) / total_mass)
        theta_acc = (gravity * sin - cos * pushed) / inertia
        return pushed - mass_length * theta_acc * cos / total_mass, theta_acc

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Puts Gymnasium's CartPole into the state ``row``."""
        renderer.state = np.array([row["x"], row["x_dot"], row["theta"], row["theta_dot"]], np.float64)
