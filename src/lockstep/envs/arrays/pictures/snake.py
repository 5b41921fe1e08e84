"""Draws a game of Snake, and writes it as text, both from a board of ages.

The age of a cell is the number of steps until it becomes free: greatest at the head, 1 at the tail, 0 for a free cell.
Food is -1.
"""

from __future__ import annotations

import numpy as np

from lockstep.envs.arrays.pictures.canvas import Canvas

SIZE = 480
"""Height and width in pixels."""
_MARGIN = 8  # pixels around the board, at least
_FLOOR, _CELL = (226, 229, 233), (250, 247, 241)
_HEAD, _NECK, _TAIL, _EYE = (28, 84, 68), (64, 156, 116), (170, 214, 190), (250, 247, 241)
_FOOD, _FOOD_LIGHT, _SHADOW = (200, 66, 52), (240, 131, 77), (60, 50, 40)


def draw(board: np.ndarray, score: int, size: int = SIZE) -> np.ndarray:
    """Draws a board of ages, int ``[rows, rows]``, from above: uint8 ``[size, size, 3]``; it doesn't show the score."""
    rows = len(board)
    tile = (size - 2 * _MARGIN) // rows
    canvas = Canvas(size, (rows / 2, rows / 2), size / tile, _FLOOR)
    canvas.lay(canvas.square((rows / 2, rows / 2), rows / 2 + 0.06, 0.12), _CELL)
    snake = [_middle(board, cell) for cell in np.argsort(-board, axis=None)[: int((board > 0).sum())]]
    for cell in np.argwhere(board < 0).tolist():
        at = (cell[1] + 0.5, rows - cell[0] - 0.5)
        _draw_food(canvas.around(at, 1.0), at)
    for place in range(len(snake) - 1, 0, -1):
        share = place / max(1, len(snake) - 1)
        colour = tuple(round(n + share * (t - n)) for n, t in zip(_NECK, _TAIL, strict=True))
        part = canvas.around(snake[place], 1.5)
        part.lay(part.bar(snake[place], snake[place - 1], 0.36 - 0.1 * share), (colour[0], colour[1], colour[2]))
    _draw_head(canvas.around(snake[0], 1.0), snake)
    return canvas.picture()


def _middle(board: np.ndarray, cell: int) -> tuple[float, float]:
    """Returns the middle of a cell; y points up."""
    row, column = divmod(int(cell), len(board))
    return column + 0.5, len(board) - row - 0.5


def _draw_food(canvas: Canvas, at: tuple[float, float]) -> None:
    x, y = at
    canvas.lay(canvas.disc((x + 0.04, y - 0.05), 0.3), _SHADOW, 0.35, 0.1)
    canvas.lay(canvas.disc((x, y), 0.3), _FOOD)
    canvas.lay(canvas.disc((x - 0.08, y + 0.1), 0.1), _FOOD_LIGHT, blur=0.08)


def _draw_head(canvas: Canvas, snake: list[tuple[float, float]]) -> None:
    (x, y), (neck_x, neck_y) = snake[0], snake[1]
    dx, dy = x - neck_x, y - neck_y
    canvas.lay(canvas.disc((x, y), 0.42), _HEAD)
    for side in (-1, 1):
        canvas.lay(canvas.disc((x + 0.14 * dx - 0.17 * side * dy, y + 0.14 * dy + 0.17 * side * dx), 0.09), _EYE)


def write(board: np.ndarray, score: int) -> str:
    """Writes a board of ages, int ``[rows, rows]``, as lines of text with a border and the score.

    ``@`` is the head, ``o`` the body, ``*`` food.
    """
    letters = np.where(board < 0, "*", np.where(board > 0, "o", "."))
    letters[board == board.max()] = "@"
    edge = "+" + "-" * (2 * len(board) - 1) + "+"
    return "\n".join([edge, *("|" + " ".join(row) + "|" for row in letters.tolist()), edge, f"score {score}"])
