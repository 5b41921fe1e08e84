"""PushCube-v0 on arrays: a planar two-link arm pushes a cube over a table to a goal, quasi-statically.

The cube moves only while it is pushed, as a heavy thing with friction does at low speed. Which way it moves and turns
under a push follows from the ellipsoidal limit surface: Lynch, Maekawa and Tanie (1992), "Manipulation and active
sensing by pushing using tactile feedback"; Goyal, Ruina and Papadopoulos (1991), "Planar sliding with dry friction".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box

from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, host_array
from lockstep.envs.arrays.pictures.push import draw, write

REWARDS = ("dense", "sparse")


class PushCube(ArrayEnvironment):
    """Task: turn the two joints of an arm so that the peg at its tip pushes a cube to a goal on the table.

    The arm's links pass above the table; only the peg touches the cube. The action sets the target speeds of the
    joints, as fractions in [-1, 1] of the greatest speed; the motors follow with a lag. An episode terminates when the
    cube's centre is within ``tolerance`` of the goal, a success, or beyond the table's edge, a failure.

    Rewards: ``"sparse"`` pays 1 at success and 0 otherwise. ``"dense"`` pays 10 per metre that a step brings the cube
    nearer to the goal, 2 per metre that it brings the peg nearer to the place behind the cube, seen from the goal, and
    5 at success.

    State, each float32 ``[n]``: joint angles ``shoulder`` (rad, from the x axis) and ``elbow`` (rad, between the
    links), their speeds ``shoulder_speed`` and ``elbow_speed`` (rad/s); the cube's centre ``cube_x``, ``cube_y`` (m)
    and yaw as ``cube_cos``, ``cube_sin``; the goal ``goal_x``, ``goal_y`` (m). The origin is the table's centre.

    The observation: cosine and sine of both joint angles, joint speeds (rad/s), peg (m), cube (m), cosine and sine of
    four times its yaw (a cube looks the same after a quarter of a turn), goal (m), cube minus peg and goal minus cube
    (m): 18 numbers.

    Args:
        reward: ``"dense"`` or ``"sparse"``.

    Raises:
        ValueError: ``reward`` is neither.
    """

    gymnasium_id = None
    max_episode_steps = 100
    reset_draws = 7
    render_fps = 20

    table_half_size: ClassVar[float] = 0.4
    """m."""
    base: ClassVar[tuple[float, float]] = (0.0, -0.7)
    """Position of the arm's shoulder, m."""
    link_length: ClassVar[float] = 0.65
    """Length of each link, m."""
    peg_radius: ClassVar[float] = 0.025
    """m."""
    cube_half_size: ClassVar[float] = 0.05
    """m."""
    tolerance: ClassVar[float] = 0.05
    """Greatest distance of the cube's centre from the goal that is a success, m."""
    contact_friction: ClassVar[float] = 0.3
    """Coefficient of friction between peg and cube."""
    turning_radius: ClassVar[float] = 0.0383
    """Mean distance of the cube's base from its centre, 0.3826 of its side, m: how hard the cube is to turn."""
    max_joint_speed: ClassVar[float] = 1.0
    """rad/s."""
    motor_gain: ClassVar[float] = 0.5
    """Share of the difference from the target speed that a motor makes up in a step."""
    shoulder_limits: ClassVar[tuple[float, float]] = (-1.2, 2.8)
    """rad."""
    elbow_limits: ClassVar[tuple[float, float]] = (0.3, 2.8)
    """rad; the arm never stretches out, so that every motion of the peg is possible by a motion of the joints."""
    time_step: ClassVar[float] = 0.05
    """s."""
    substeps: ClassVar[int] = 4
    """Number of times that contacts are solved in a step, so that the peg moves by less than its radius in between."""
    home: ClassVar[tuple[float, float]] = (0.296, 2.55)
    """Joint angles around which an episode starts, rad."""

    def __init__(self, reward: str = "dense") -> None:
        if reward not in REWARDS:
            raise ValueError(f"reward: {reward!r} isn't offered; use 'dense' or 'sparse'")
        self.reward = reward
        high = np.array([1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 2.5, 2.5, 2, 2], np.float32)
        self.observation_space = Box(-high, high, dtype=np.float32)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts near the home position, with the cube near the table's centre and the goal 8 to 28 cm from it."""
        centred = 2 * random - 1
        cube_x, cube_y = 0.2 * centred[:, 2], 0.03 + 0.17 * centred[:, 3]
        yaw, direction = 0.25 * math.pi * centred[:, 4], math.pi * centred[:, 5]
        distance = 0.2 + 0.08 * centred[:, 6]
        state = {
            "shoulder": self.home[0] + 0.15 * centred[:, 0],
            "elbow": self.home[1] + 0.1 * centred[:, 1],
            "shoulder_speed": xp.zeros_like(yaw),
            "elbow_speed": xp.zeros_like(yaw),
            "cube_x": cube_x,
            "cube_y": cube_y,
            "cube_cos": xp.cos(yaw),
            "cube_sin": xp.sin(yaw),
            "goal_x": xp.clip(cube_x + distance * xp.cos(direction), -0.28, 0.28),
            "goal_y": xp.clip(cube_y + distance * xp.sin(direction), -0.28, 0.28),
        }
        return state, self._observe(xp, state, *self._peg(xp, state["shoulder"], state["elbow"]))

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step of 0.05 s, in which the peg moves straight to where the joints take it, and pushes."""
        peg_x, peg_y = self._peg(xp, state["shoulder"], state["elbow"])
        moved = self._turn_joints(xp, state, xp.clip(xp.asarray(action, dtype=peg_x.dtype), -1.0, 1.0))
        end_x, end_y = self._peg(xp, moved["shoulder"], moved["elbow"])
        dx, dy = (end_x - peg_x) / self.substeps, (end_y - peg_y) / self.substeps
        cube = tuple(state[name] for name in ("cube_x", "cube_y", "cube_cos", "cube_sin"))
        for number in range(1, self.substeps + 1):
            cube = self._push(xp, cube, peg_x + number * dx, peg_y + number * dy, dx, dy)
        moved |= dict(zip(("cube_x", "cube_y", "cube_cos", "cube_sin"), cube, strict=True))
        moved |= {"goal_x": state["goal_x"] + 0.0, "goal_y": state["goal_y"] + 0.0}
        success = self.success(xp, moved)
        fallen = xp.maximum(xp.abs(moved["cube_x"]), xp.abs(moved["cube_y"])) > self.table_half_size
        reward = xp.astype(success, peg_x.dtype)
        if self.reward == "dense":
            before, after = self._closeness(xp, state, peg_x, peg_y), self._closeness(xp, moved, end_x, end_y)
            reward = 5 * reward + (after - before)
        return moved, self._observe(xp, moved, end_x, end_y), reward, success | fallen

    def success(self, xp: Any, state: State) -> Array:
        """Returns whether the cube's centre lies within ``tolerance`` of the goal, bool ``[n]``."""
        dx, dy = state["goal_x"] - state["cube_x"], state["goal_y"] - state["cube_y"]
        return dx * dx + dy * dy < self.tolerance**2

    def _turn_joints(self, xp: Any, state: State, action: Array) -> State:
        """Returns angles and speeds of both joints after a step; a joint at its limit stands still."""
        out = {}
        for column, (name, limits) in enumerate((("shoulder", self.shoulder_limits), ("elbow", self.elbow_limits))):
            speed = state[f"{name}_speed"]
            speed = speed + self.motor_gain * (self.max_joint_speed * action[:, column] - speed)
            free = state[name] + self.time_step * speed
            angle = xp.clip(free, *limits)
            out |= {name: angle, f"{name}_speed": xp.where(angle == free, speed, xp.zeros_like(speed))}
        return out

    def _peg(self, xp: Any, shoulder: Array, elbow: Array) -> tuple[Array, Array]:
        """Returns the position of the peg, m."""
        outer = shoulder + elbow
        x = self.base[0] + self.link_length * (xp.cos(shoulder) + xp.cos(outer))
        return x, self.base[1] + self.link_length * (xp.sin(shoulder) + xp.sin(outer))

    def _push(self, xp: Any, cube: tuple[Array, ...], peg_x: Array, peg_y: Array, dx: Array, dy: Array) -> tuple:
        """Returns the cube's centre and yaw after the peg has moved by ``dx``, ``dy`` to ``peg_x``, ``peg_y``.

        In the cube's axes, at the point of contact p, with the inward normal n and the tangent t: the cube must give
        way by the depth of penetration along n. The limit surface relates force and motion, so that the motion of the
        cube at p is ``M f`` with ``M = 1 + (p x)(p x)' / c²``. If the force that would carry p along with the peg lies
        in the cone of friction, the peg sticks. Otherwise it slides, with the force on the cone's edge.
        """
        x, y, cos, sin = cube
        rx, ry = peg_x - x, peg_y - y
        depth, px, py, nx, ny = self._contact(xp, cos * rx + sin * ry, cos * ry - sin * rx)
        slide = ny * (cos * dx + sin * dy) - nx * (cos * dy - sin * dx)  # the peg's motion along t = (ny, -nx)
        c2 = self.turning_radius**2
        normal_arm, tangent_arm = px * ny - py * nx, -(px * nx + py * ny)  # p x n, p x t
        nn, tt = 1 + normal_arm * normal_arm / c2, 1 + tangent_arm * tangent_arm / c2
        nt = normal_arm * tangent_arm / c2
        determinant = nn * tt - nt * nt
        stick_n, stick_t = (tt * depth - nt * slide) / determinant, (nn * slide - nt * depth) / determinant
        sticks = xp.abs(stick_t) <= self.contact_friction * stick_n
        edge = xp.where(stick_t > 0, xp.full_like(nt, self.contact_friction), xp.full_like(nt, -self.contact_friction))
        slide_n = depth / (nn + edge * nt)
        touches = depth > 0
        zero = xp.zeros_like(depth)
        force_n = xp.where(touches, xp.where(sticks, stick_n, slide_n), zero)
        force_t = xp.where(touches, xp.where(sticks, stick_t, edge * slide_n), zero)
        fx, fy = force_n * nx + force_t * ny, force_n * ny - force_t * nx
        half_turn = 0.5 * (px * fy - py * fx) / c2
        return (x + cos * fx - sin * fy, y + sin * fx + cos * fy, *_turned(xp, cos, sin, half_turn))

    def _contact(self, xp: Any, x: Array, y: Array) -> tuple[Array, ...]:
        """Returns penetration depth, point of contact and inward normal of a peg at ``x``, ``y`` in the cube's axes."""
        half = self.cube_half_size
        near_x, near_y = xp.clip(x, -half, half), xp.clip(y, -half, half)
        gap_x, gap_y = x - near_x, y - near_y
        gap = xp.sqrt(gap_x * gap_x + gap_y * gap_y)
        outside = gap > 0
        one = xp.ones_like(gap)
        safe = xp.where(outside, gap, one)
        # A centre inside the cube is pushed out through the nearest face.
        by_x = xp.abs(x) > xp.abs(y)
        side_x, side_y = xp.where(x > 0, one, -one), xp.where(y > 0, one, -one)
        face_x, face_y = xp.where(by_x, side_x, 0 * one), xp.where(by_x, 0 * one, side_y)
        inside_depth = self.peg_radius + half - xp.maximum(xp.abs(x), xp.abs(y))
        depth = xp.where(outside, self.peg_radius - gap, inside_depth)
        nx = -xp.where(outside, gap_x / safe, face_x)
        ny = -xp.where(outside, gap_y / safe, face_y)
        px = xp.where(outside, near_x, xp.where(by_x, half * side_x, x))
        py = xp.where(outside, near_y, xp.where(by_x, y, half * side_y))
        return depth, px, py, nx, ny

    def _closeness(self, xp: Any, state: State, peg_x: Array, peg_y: Array) -> Array:
        """Returns the potential whose increase the dense reward pays, at most 0."""
        gx, gy = state["goal_x"] - state["cube_x"], state["goal_y"] - state["cube_y"]
        goal = xp.sqrt(gx * gx + gy * gy)
        back = (self.cube_half_size + self.peg_radius) / xp.maximum(goal, xp.full_like(goal, 1e-3))
        bx, by = state["cube_x"] - back * gx - peg_x, state["cube_y"] - back * gy - peg_y
        return -10 * goal - 2 * xp.sqrt(bx * bx + by * by)

    def _observe(self, xp: Any, state: State, peg_x: Array, peg_y: Array) -> Array:
        s = state
        cos2, sin2 = s["cube_cos"] * s["cube_cos"] - s["cube_sin"] * s["cube_sin"], 2 * s["cube_cos"] * s["cube_sin"]
        columns = (
            *(xp.cos(s["shoulder"]), xp.sin(s["shoulder"]), xp.cos(s["elbow"]), xp.sin(s["elbow"])),
            *(s["shoulder_speed"], s["elbow_speed"], peg_x, peg_y, s["cube_x"], s["cube_y"]),
            *(cos2 * cos2 - sin2 * sin2, 2 * cos2 * sin2, s["goal_x"], s["goal_y"]),
            *(s["cube_x"] - peg_x, s["cube_y"] - peg_y, s["goal_x"] - s["cube_x"], s["goal_y"] - s["cube_y"]),
        )
        return xp.stack(columns, axis=-1)

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """Draws one environment from above; see :meth:`ArrayEnvironment.render`. Needs nothing else installed."""
        return draw(self, self._row(state, index))

    def text(self, state: State, index: int = 0) -> str:
        """Returns one environment from above as text."""
        return write(self, self._row(state, index))

    def _row(self, state: State, index: int) -> dict[str, float]:
        return {name: float(host_array(values[index])) for name, values in state.items()}


def _turned(xp: Any, cos: Array, sin: Array, half: Array) -> tuple[Array, Array]:
    """Turns a unit vector by ``2 atan(half)`` and normalises it; its bits don't depend on a row's place."""
    scale = 1 + half * half
    c, s = (1 - half * half) / scale, 2 * half / scale
    turned_cos, turned_sin = cos * c - sin * s, sin * c + cos * s
    length = xp.sqrt(turned_cos * turned_cos + turned_sin * turned_sin)
    return turned_cos / length, turned_sin / length
