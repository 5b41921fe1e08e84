"""Plays Snake greedily: moves straight to the food, but avoids cells where the game would end, if it can."""

from __future__ import annotations

import numpy as np

DOWN, RIGHT = np.array([0, 1, 0, -1]), np.array([-1, 0, 1, 0])
"""Rows and columns by which each action moves the head."""


def greedy_actions(images: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """Returns actions, int64 ``[n]``, for images of ``n`` boards, uint8 ``[n, size, size, 3]``: head, body, food.

    It takes the move into a free cell that leads nearest to the food, at random among equal ones. If every move ends
    the game, it takes one of them. The cell that the tail is about to leave counts as taken.
    """
    count, size = len(images), images.shape[1]
    flat = images.reshape(count, -1, 3)
    head, food = flat[..., 0].argmax(1), flat[..., 2].argmax(1)
    rows, columns = (head // size)[:, None] + DOWN, (head % size)[:, None] + RIGHT
    inside = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < size)
    cells = np.clip(rows, 0, size - 1) * size + np.clip(columns, 0, size - 1)
    free = inside & (np.take_along_axis(flat[..., 1], cells, 1) == 0)
    distance = abs(rows - (food // size)[:, None]) + abs(columns - (food % size)[:, None])
    cost = distance + 0.5 * noise.random((count, 4)) + np.where(free, 0, 4 * size)
    return cost.argmin(1)
