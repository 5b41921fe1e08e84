"""MountainCar-v0 and MountainCarContinuous-v0 on arrays: a car too weak for the hill has to swing itself up.

Moore (1990), "Efficient memory-based learning for robot control", PhD thesis, University of Cambridge, as Gymnasium
simulates it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from lockstep.envs.arrays.arguments import finite_number
from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, side_by_side


class _Hill(ArrayEnvironment):
    """The physics that both cars share: the valley ``sin(3 position)``, its walls, and the start near its bottom."""

    reset_draws = 1
    render_fps = 30

    gravity: float = 0.0025
    """Acceleration of gravity, per step²."""
    power: ClassVar[float]
    """Acceleration at full throttle, per step²."""
    goal_position: ClassVar[float]
    """Position at which an episode terminates."""
    positions: ClassVar[tuple[float, float]] = (-1.2, 0.6)
    """Positions of the walls; the left one stops the car."""
    max_speed: ClassVar[float] = 0.07
    """Greatest speed, per step."""
    reset_positions: ClassVar[tuple[float, float]] = (-0.6, -0.4)
    """A reset draws ``position`` uniformly from between these."""

    def __init__(self, goal_velocity: float = 0.0) -> None:
        self.goal_velocity = finite_number("goal_velocity", goal_velocity)
        low, high = np.array([self.positions, (-self.max_speed, self.max_speed)], np.float32).T
        self.observation_space = Box(low, high, dtype=np.float32)
        self.action_space = self._actions()

    @abstractmethod
    def _actions(self) -> Discrete | Box:
        """Returns the action space."""

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode at rest, at a position uniform in [-0.6, -0.4]."""
        low, high = self.reset_positions
        position = low + (high - low) * random[:, 0]
        state = {"position": position, "velocity": xp.zeros_like(position)}
        return state, side_by_side(xp, tuple(state.values()))

    def _driven(self, xp: Any, state: State, throttle: Array) -> tuple[State, Array, Array]:
        """Returns state, observation and terminated after a step with throttles in [-1, 1], float32 ``[n]``."""
        push = self.power * throttle - self.gravity * xp.cos(3 * state["position"])
        velocity = xp.clip(state["velocity"] + push, -self.max_speed, self.max_speed)
        free = state["position"] + velocity
        at_wall = (free <= self.positions[0]) & (velocity < 0)
        moved = {
            "position": xp.clip(free, *self.positions),
            "velocity": xp.where(at_wall, xp.zeros_like(velocity), velocity),
        }
        terminated = (moved["position"] >= self.goal_position) & (moved["velocity"] >= self.goal_velocity)
        return moved, side_by_side(xp, tuple(moved.values())), terminated

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Puts Gymnasium's car into the state ``row``."""
        renderer.state = np.array([row["position"], row["velocity"]], np.float64)


class MountainCar(_Hill):
    """Task: accelerate left (0), not at all (1) or right (2) until the car is on the hill; each step's reward is -1.

    State, each float32 ``[n]``: ``position`` in [-1.2, 0.6], the goal at 0.5, and ``velocity`` in ±0.07 a step.
    The observation is these two in this order.

    Args:
        goal_velocity: least velocity at the goal that ends the episode; the name is Gymnasium's.

    Raises:
        ValueError: ``goal_velocity`` is no finite number.
    """

    gymnasium_id = "MountainCar-v0"
    max_episode_steps = 200
    power = 0.001
    goal_position = 0.5

    def _actions(self) -> Discrete:
        return Discrete(3)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step."""
        throttle = xp.astype(action, state["position"].dtype) - 1
        moved, observation, terminated = self._driven(xp, state, throttle)
        return moved, observation, -xp.ones_like(throttle), terminated


class MountainCarContinuous(_Hill):
    """Task: accelerate by a throttle in [-1, 1] until the car is on the hill; 100 there, less 0.1 throttle² a step.

    State, each float32 ``[n]``: ``position`` in [-1.2, 0.6], the goal at 0.45, and ``velocity`` in ±0.07 a step.
    The observation is these two in this order. As in Gymnasium, a throttle beyond its bounds is clipped for the motion
    but not for its cost.

    Args:
        goal_velocity: least velocity at the goal that ends the episode; the name is Gymnasium's.

    Raises:
        ValueError: ``goal_velocity`` is no finite number.
    """

    gymnasium_id = "MountainCarContinuous-v0"
    max_episode_steps = 999
    power = 0.0015
    goal_position = 0.45

    def _actions(self) -> Box:
        return Box(-1.0, 1.0, (1,), np.float32)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step."""
        throttle = xp.asarray(action, dtype=state["position"].dtype)[:, 0]
        moved, observation, terminated = self._driven(xp, state, xp.clip(throttle, -1.0, 1.0))
        arrived = xp.where(terminated, xp.full_like(throttle, 100.0), xp.zeros_like(throttle))
        return moved, observation, arrived - 0.1 * (throttle * throttle), terminated
