"""Pictures of PushCube drawn with NumPy alone, from signed distances; and the same as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lockstep.envs.arrays.push import PushCube

SIZE = 480
"""Pixels, of both sides."""
_CENTRE, _VIEW = (0.0, -0.14), 1.44  # m: the table and the arm behind it
_FLOOR, _TABLE, _EDGE = (226, 229, 233), (250, 247, 241), (205, 197, 183)
_GOAL, _REACHED, _CUBE, _CUBE_TOP = (64, 156, 116), (22, 190, 108), (214, 94, 44), (240, 131, 77)
_ARM, _ARM_LIGHT, _JOINT, _PEG, _SHADOW = (58, 78, 107), (92, 117, 152), (36, 48, 68), (24, 28, 36), (60, 50, 40)

Point = tuple[float, float]


class _Canvas:
    """An RGB picture in metres, on which shapes are laid by their signed distances (negative inside)."""

    def __init__(self, size: int) -> None:
        self._scale = size / _VIEW
        along = (np.arange(size) + 0.5) / self._scale - _VIEW / 2
        self.x, self.y = np.meshgrid(_CENTRE[0] + along, _CENTRE[1] - along)
        self.pixels = np.broadcast_to(np.array(_FLOOR, np.float64), (size, size, 3)).copy()

    def lay(self, distance: np.ndarray, colour: tuple[int, int, int], opacity: float = 1.0, blur: float = 0.0) -> None:
        """Paint where ``distance`` is negative; the border is a pixel wide, or ``blur`` metres."""
        width = max(blur, 1 / self._scale)
        cover = opacity * np.clip(0.5 - distance / width, 0.0, 1.0)[..., None]
        self.pixels += cover * (np.array(colour, np.float64) - self.pixels)

    def disc(self, centre: Point, radius: float) -> np.ndarray:
        return np.hypot(self.x - centre[0], self.y - centre[1]) - radius

    def bar(self, start: Point, end: Point, radius: float) -> np.ndarray:
        """A bar with round ends."""
        ax, ay = end[0] - start[0], end[1] - start[1]
        rx, ry = self.x - start[0], self.y - start[1]
        share = np.clip((rx * ax + ry * ay) / (ax * ax + ay * ay), 0.0, 1.0)
        return np.hypot(rx - share * ax, ry - share * ay) - radius

    def square(self, centre: Point, half: float, rounding: float, yaw: Point = (1.0, 0.0)) -> np.ndarray:
        """A square with rounded corners; ``yaw`` is its cosine and sine."""
        rx, ry = self.x - centre[0], self.y - centre[1]
        qx = np.abs(yaw[0] * rx + yaw[1] * ry) - (half - rounding)
        qy = np.abs(yaw[0] * ry - yaw[1] * rx) - (half - rounding)
        return np.hypot(np.maximum(qx, 0), np.maximum(qy, 0)) + np.minimum(np.maximum(qx, qy), 0) - rounding


def draw(env: PushCube, row: dict[str, float], size: int = SIZE) -> np.ndarray:
    """One environment from above, uint8 ``[size, size, 3]``.

    Args:
        env: whose lengths these are.
        row: the state of one environment.
        size: pixels, of both sides.
    """
    canvas = _Canvas(size)
    half = env.table_half_size
    canvas.lay(canvas.square((0.012, -0.018), half, 0.02), _SHADOW, 0.25, 0.05)
    table = canvas.square((0.0, 0.0), half, 0.02)
    canvas.lay(table, _EDGE)
    canvas.lay(table + 0.008, _TABLE)
    _draw_goal(canvas, env, row)
    _draw_cube(canvas, env, row)
    _draw_arm(canvas, env, row)
    return np.rint(canvas.pixels).astype(np.uint8)


def _draw_goal(canvas: _Canvas, env: PushCube, row: dict[str, float]) -> None:
    reached = bool(env.success(np, {name: np.array([value]) for name, value in row.items()})[0])
    colour, goal = _REACHED if reached else _GOAL, (row["goal_x"], row["goal_y"])
    disc = canvas.disc(goal, env.tolerance)
    canvas.lay(disc, colour, 0.5 if reached else 0.22)
    canvas.lay(np.abs(disc + 0.004) - 0.004, colour)
    canvas.lay(canvas.disc(goal, 0.008), colour)


def _draw_cube(canvas: _Canvas, env: PushCube, row: dict[str, float]) -> None:
    x, y, half = row["cube_x"], row["cube_y"], env.cube_half_size
    yaw = (row["cube_cos"], row["cube_sin"])
    canvas.lay(canvas.square((x + 0.008, y - 0.012), half, 0.006, yaw), _SHADOW, 0.35, 0.02)
    cube = canvas.square((x, y), half, 0.006, yaw)
    canvas.lay(cube, _CUBE, 0.95)
    canvas.lay(cube + 0.007, _CUBE_TOP, 0.95)
    canvas.lay(canvas.disc((x, y), 0.006), _CUBE)


def _draw_arm(canvas: _Canvas, env: PushCube, row: dict[str, float]) -> None:
    shoulder, elbow, peg = joints(env, row)
    canvas.lay(canvas.disc(peg, env.peg_radius), _PEG)
    canvas.lay(canvas.square(shoulder, 0.075, 0.02), _JOINT)
    for start, end in ((shoulder, elbow), (elbow, peg)):
        for offset, opacity, blur in (((0.014, -0.022), 0.18, 0.03), ((0.0, 0.0), 0.88, 0.0)):
            (sx, sy), (ex, ey) = ((p[0] + offset[0], p[1] + offset[1]) for p in (start, end))
            canvas.lay(canvas.bar((sx, sy), (ex, ey), 0.026), _SHADOW if blur else _ARM, opacity, blur)
        canvas.lay(canvas.bar(start, end, 0.012), _ARM_LIGHT, 0.9)
    for joint, radius in ((shoulder, 0.042), (elbow, 0.036), (peg, env.peg_radius + 0.005)):
        canvas.lay(canvas.disc(joint, radius), _JOINT)
        canvas.lay(canvas.disc(joint, 0.4 * radius), _ARM_LIGHT)


def joints(env: PushCube, row: dict[str, float]) -> tuple[Point, Point, Point]:
    """Where shoulder, elbow and peg are, m."""
    first, second = row["shoulder"], row["shoulder"] + row["elbow"]
    (x, y), length = env.base, env.link_length
    x1, y1 = x + length * float(np.cos(first)), y + length * float(np.sin(first))
    return (x, y), (x1, y1), (x1 + length * float(np.cos(second)), y1 + length * float(np.sin(second)))


def write(env: PushCube, row: dict[str, float], columns: int = 41) -> str:
    """One environment as text: the table from above, ``#`` the cube, ``o`` the goal, ``*`` the peg.

    Args:
        env: whose lengths these are.
        row: the state of one environment.
        columns: characters a line; a line is as high as two are wide.
    """
    half, lines = env.table_half_size, (columns + 1) // 2
    x, y = np.meshgrid(np.linspace(-half, half, columns), np.linspace(half, -half, lines))
    picture = np.full(x.shape, " ")
    picture[np.hypot(x - row["goal_x"], y - row["goal_y"]) <= env.tolerance] = "o"
    rx, ry, cos, sin = x - row["cube_x"], y - row["cube_y"], row["cube_cos"], row["cube_sin"]
    picture[np.maximum(np.abs(cos * rx + sin * ry), np.abs(cos * ry - sin * rx)) <= env.cube_half_size] = "#"
    peg = joints(env, row)[2]
    near = np.unravel_index(np.argmin(np.hypot(x - peg[0], y - peg[1])), x.shape)
    picture[near] = "*"
    edge = "+" + "-" * columns + "+"
    gap = float(np.hypot(row["goal_x"] - row["cube_x"], row["goal_y"] - row["cube_y"]))
    return "\n".join([edge, *("|" + "".join(line) + "|" for line in picture), edge, f"cube to goal: {gap:.3f} m"])
