"""Draws a grid world, and writes it as text, both from a map of letters.

``A`` is the agent, ``G`` the goal, ``#`` a wall, ``o`` a hole and ``.`` an open cell; ``*`` is the agent at the goal,
``x`` the agent in a hole.
"""

from __future__ import annotations

import numpy as np

from lockstep.envs.arrays.pictures.canvas import Canvas

SIZE = 480
"""Height and width in pixels."""
_MARGIN = 8  # pixels around the world, at least
_FLOOR, _CELL, _SHADOW = (226, 229, 233), (250, 247, 241), (60, 50, 40)
_WALL, _WALL_TOP, _HOLE, _HOLE_DEEP = (92, 102, 118), (122, 133, 150), (46, 62, 92), (24, 32, 50)
_GOAL, _REACHED, _AGENT, _AGENT_TOP = (64, 156, 116), (22, 190, 108), (214, 94, 44), (240, 131, 77)


def draw(letters: np.ndarray, size: int = SIZE) -> np.ndarray:
    """Draws a world from above, uint8 ``[size, size, 3]``, from the letters of its cells, ``[rows, rows]``."""
    rows = len(letters)
    tile = (size - 2 * _MARGIN) // rows
    start = (size - rows * tile) // 2
    tiles = {letter: _tile(letter, tile) for letter in np.unique(letters).tolist()}
    picture = np.broadcast_to(np.array(_FLOOR, np.uint8), (size, size, 3)).copy()
    for (row, column), letter in np.ndenumerate(letters):
        top, left = start + row * tile, start + column * tile
        picture[top : top + tile, left : left + tile] = tiles[str(letter)]
    return picture


def _tile(letter: str, size: int) -> np.ndarray:
    """Draws one cell, uint8 ``[size, size, 3]``; its side is the unit of length."""
    canvas = Canvas(size, (0.0, 0.0), 1.0, _FLOOR)
    square = canvas.square((0.0, 0.0), 0.47, 0.06)
    canvas.lay(square, _WALL if letter == "#" else _CELL)
    if letter == "#":
        canvas.lay(square + 0.06, _WALL_TOP)
    if letter in "ox":
        canvas.lay(canvas.disc((0.0, 0.0), 0.38), _HOLE)
        canvas.lay(canvas.disc((0.0, -0.03), 0.32), _HOLE_DEEP, blur=0.08)
    if letter in "G*":
        goal, colour = canvas.square((0.0, 0.0), 0.4, 0.08), _REACHED if letter == "*" else _GOAL
        canvas.lay(goal, colour, 0.5 if letter == "*" else 0.25)
        canvas.lay(np.abs(goal + 0.03) - 0.03, colour)
    if letter in "A*x":
        radius = 0.21 if letter == "x" else 0.3
        canvas.lay(canvas.disc((0.03, -0.05), radius), _SHADOW, 0.35, 0.1)
        canvas.lay(canvas.disc((0.0, 0.0), radius), _AGENT)
        canvas.lay(canvas.disc((-0.03, 0.04), 0.73 * radius), _AGENT_TOP, blur=0.08)
    return canvas.picture()


def write(letters: np.ndarray) -> str:
    """Writes a world as lines of text with a border, from the letters of its cells, ``[rows, rows]``."""
    edge = "+" + "-" * (2 * len(letters) - 1) + "+"
    return "\n".join([edge, *("|" + " ".join(row) + "|" for row in letters.tolist()), edge])
