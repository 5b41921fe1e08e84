"""Draws shapes into an RGB picture with NumPy alone, by signed distances."""

from __future__ import annotations

import numpy as np

Point = tuple[float, float]
Colour = tuple[int, int, int]


class Canvas:
    """A square picture on which shapes are painted by their signed distances (negative inside).

    Its sides have ``size`` pixels and show a length of ``view``; ``centre`` is the point in the middle, and y points
    up.
    """

    def __init__(self, size: int, centre: Point, view: float, floor: Colour) -> None:
        self._scale = size / view
        along = (np.arange(size) + 0.5) / self._scale - view / 2
        self.x, self.y = np.meshgrid(centre[0] + along, centre[1] - along)
        self.pixels = np.broadcast_to(np.array(floor, np.float64), (size, size, 3)).copy()

    def around(self, centre: Point, half: float) -> Canvas:
        """Returns the part of the picture around a point, to paint small shapes quickly; both share their pixels."""
        left, top = centre[0] - half - self.x[0, 0], self.y[0, 0] - centre[1] - half
        first = [max(0, int(edge * self._scale)) for edge in (top, left)]
        rows, columns = (slice(start, start + int(2 * half * self._scale) + 2) for start in first)
        part = object.__new__(Canvas)
        part._scale, part.pixels = self._scale, self.pixels[rows, columns]
        part.x, part.y = self.x[rows, columns], self.y[rows, columns]
        return part

    def lay(self, distance: np.ndarray, colour: Colour, opacity: float = 1.0, blur: float = 0.0) -> None:
        """Paints where ``distance`` is negative; the border is a pixel wide, or ``blur`` units."""
        width = max(blur, 1 / self._scale)
        cover = opacity * np.clip(0.5 - distance / width, 0.0, 1.0)[..., None]
        self.pixels += cover * (np.array(colour, np.float64) - self.pixels)

    def disc(self, centre: Point, radius: float) -> np.ndarray:
        """Returns the distance from a disc."""
        return np.hypot(self.x - centre[0], self.y - centre[1]) - radius

    def bar(self, start: Point, end: Point, radius: float) -> np.ndarray:
        """Returns the distance from a bar with round ends."""
        ax, ay = end[0] - start[0], end[1] - start[1]
        rx, ry = self.x - start[0], self.y - start[1]
        share = np.clip((rx * ax + ry * ay) / (ax * ax + ay * ay), 0.0, 1.0)
        return np.hypot(rx - share * ax, ry - share * ay) - radius

    def square(self, centre: Point, half: float, rounding: float, yaw: Point = (1.0, 0.0)) -> np.ndarray:
        """Returns the distance from a square with rounded corners; ``yaw`` is its cosine and sine."""
        rx, ry = self.x - centre[0], self.y - centre[1]
        qx = np.abs(yaw[0] * rx + yaw[1] * ry) - (half - rounding)
        qy = np.abs(yaw[0] * ry - yaw[1] * rx) - (half - rounding)
        return np.hypot(np.maximum(qx, 0), np.maximum(qy, 0)) + np.minimum(np.maximum(qx, qy), 0) - rounding

    def picture(self) -> np.ndarray:
        """Returns what was drawn, uint8 ``[size, size, 3]``."""
        return np.rint(self.pixels).astype(np.uint8)
