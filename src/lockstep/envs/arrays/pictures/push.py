"""Draws PushCube from above, and writes it as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep.envs.arrays.pictures.canvas import Canvas, Point

if TYPE_CHECKING:
    from lockstep.envs.arrays.push import PushCube

SIZE = 480
"""Height and width in pixels."""
_CENTRE, _VIEW = (0.0, -0.14), 1.44  # m: the table and the arm behind it
_FLOOR, _TABLE, _EDGE = (226, 229, 233), (250, 247, 241), (205, 197, 183)
_GOAL, _REACHED, _CUBE, _CUBE_TOP = (64, 156, 116), (22, 190, 108), (214, 94, 44), (240, 131, 77)
_ARM, _ARM_LIGHT, _JOINT, _PEG, _SHADOW = (58, 78, 107), (92, 117, 152), (36, 48, 68), (24, 28, 36), (60, 50, 40)


def draw(env: PushCube, row: dict[str, float], size: int = SIZE) -> np.ndarray:
    """Draws the state ``row`` of one environment from above, uint8 ``[size, size, 3]``."""
    canvas = Canvas(size, _CENTRE, _VIEW, _FLOOR)
    half = env.table_half_size
    canvas.lay(canvas.square((0.012, -0.018), half, 0.02), _SHADOW, 0.25, 0.05)
    table = canvas.square((0.0, 0.0), half, 0.02)
    canvas.lay(table, _EDGE)
    canvas.lay(table + 0.008, _TABLE)
    _draw_goal(canvas, env, row)
    _draw_cube(canvas, env, row)
    _draw_arm(canvas, env, row)
    return canvas.picture()


def _draw_goal(canvas: Canvas, env: PushCube, row: dict[str, float]) -> None:
    reached = bool(env.success(np, {name: np.array([value]) for name, value in row.items()})[0])
    colour, goal = _REACHED if reached else _GOAL, (row["goal_x"], row["goal_y"])
    disc = canvas.disc(goal, env.tolerance)
    canvas.lay(disc, colour, 0.5 if reached else 0.22)
    canvas.lay(np.abs(disc + 0.004) - 0.004, colour)
    canvas.lay(canvas.disc(goal, 0.008), colour)


def _draw_cube(canvas: Canvas, env: PushCube, row: dict[str, float]) -> None:
    x, y, half = row["cube_x"], row["cube_y"], env.cube_half_size
    yaw = (row["cube_cos"], row["cube_sin"])
    canvas.lay(canvas.square((x + 0.008, y - 0.012), half, 0.006, yaw), _SHADOW, 0.35, 0.02)
    cube = canvas.square((x, y), half, 0.006, yaw)
    canvas.lay(cube, _CUBE, 0.95)
    canvas.lay(cube + 0.007, _CUBE_TOP, 0.95)
    canvas.lay(canvas.disc((x, y), 0.006), _CUBE)


def _draw_arm(canvas: Canvas, env: PushCube, row: dict[str, float]) -> None:
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
    """Returns the positions of shoulder, elbow and peg, m."""
    first, second = row["shoulder"], row["shoulder"] + row["elbow"]
    (x, y), length = env.base, env.link_length
    x1, y1 = x + length * float(np.cos(first)), y + length * float(np.sin(first))
    return (x, y), (x1, y1), (x1 + length * float(np.cos(second)), y1 + length * float(np.sin(second)))


def write(env: PushCube, row: dict[str, float], columns: int = 41) -> str:
    """Writes the table from above as text: ``#`` is the cube, ``o`` the goal, ``*`` the peg.

    A line has ``columns`` characters, and is as high as two characters are wide.
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
