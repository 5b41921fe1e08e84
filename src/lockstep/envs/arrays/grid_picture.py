"""Pictures of a grid world and the same as text, both from a map of letters.

``A`` is the agent, ``G`` the goal, ``#`` a wall, ``o`` a hole and ``.`` an open cell; ``*`` is the agent at the goal,
``x`` the agent in a hole.
"""

from __future__ import annotations

import numpy as np

from lockstep.envs.arrays.canvas import Canvas, Point

SIZE = 480
"""Pixels, of both sides."""
_MARGIN = 0.3  # cells around the world
_FLOOR, _CELL, _SHADOW = (226, 229, 233), (250, 247, 241), (60, 50, 40)
_WALL, _WALL_TOP, _HOLE, _HOLE_DEEP = (92, 102, 118), (122, 133, 150), (46, 62, 92), (24, 32, 50)
_GOAL, _REACHED, _AGENT, _AGENT_TOP = (64, 156, 116), (22, 190, 108), (214, 94, 44), (240, 131, 77)


def draw(letters: np.ndarray, size: int = SIZE) -> np.ndarray:
    """A world from above, uint8 ``[size, size, 3]``.

    Args:
        letters: what stands in each cell, ``[rows, rows]``.
        size: pixels, of both sides.
    """
    rows = len(letters)
    canvas = Canvas(size, (rows / 2, -rows / 2), rows + 2 * _MARGIN, _FLOOR)
    for (row, column), letter in np.ndenumerate(letters):
        centre = (column + 0.5, -row - 0.5)
        canvas.lay(canvas.square(centre, 0.47, 0.06), _CELL)
        if letter == "#":
            _draw_wall(canvas, centre)
        if letter in "ox":
            canvas.lay(canvas.disc(centre, 0.38), _HOLE)
            canvas.lay(canvas.disc((centre[0], centre[1] - 0.03), 0.32), _HOLE_DEEP, blur=0.08)
        if letter in "G*":
            _draw_goal(canvas, centre, letter == "*")
        if letter in "A*x":
            _draw_agent(canvas, centre, 0.7 if letter == "x" else 1.0)
    return canvas.picture()


def _draw_wall(canvas: Canvas, centre: Point) -> None:
    canvas.lay(canvas.square((centre[0] + 0.04, centre[1] - 0.06), 0.47, 0.06), _SHADOW, 0.25, 0.1)
    wall = canvas.square(centre, 0.47, 0.06)
    canvas.lay(wall, _WALL)
    canvas.lay(wall + 0.06, _WALL_TOP)


def _draw_goal(canvas: Canvas, centre: Point, reached: bool) -> None:
    square = canvas.square(centre, 0.4, 0.08)
    colour = _REACHED if reached else _GOAL
    canvas.lay(square, colour, 0.5 if reached else 0.25)
    canvas.lay(np.abs(square + 0.03) - 0.03, colour)


def _draw_agent(canvas: Canvas, centre: Point, scale: float) -> None:
    canvas.lay(canvas.disc((centre[0] + 0.03, centre[1] - 0.05), 0.3 * scale), _SHADOW, 0.35, 0.1)
    canvas.lay(canvas.disc(centre, 0.3 * scale), _AGENT)
    canvas.lay(canvas.disc((centre[0] - 0.03, centre[1] + 0.04), 0.22 * scale), _AGENT_TOP, blur=0.08)


def write(letters: np.ndarray) -> str:
    """A world as lines of text with a border.

    Args:
        letters: what stands in each cell, ``[rows, rows]``.
    """
    edge = "+" + "-" * (2 * len(letters) - 1) + "+"
    return "\n".join([edge, *("|" + " ".join(row) + "|" for row in letters.tolist()), edge])
