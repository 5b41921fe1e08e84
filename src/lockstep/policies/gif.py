"""Writes frames at a steady rate as a GIF that browsers play at that rate."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

FASTEST = 50
"""Most frames per second of a GIF that browsers show; they play a faster one at ten."""


class GifWriter:
    """Collects frames at ``fps`` a second and writes them when it is closed.

    A GIF's delays are whole hundredths of a second, so delays differ by one where that keeps the rate. Above
    :data:`FASTEST` only every second, third, … frame is kept. Raises an ``OSError`` at once if the file can't be
    written.
    """

    def __init__(self, video: Path, fps: int) -> None:
        self._video, self._fps, self._every = video, fps, -(-fps // FASTEST)
        self._given, self._kept = 0, []
        video.open("wb").close()

    def append_data(self, picture: Any) -> None:
        """Takes a frame, uint8 ``[height, width, 3]``."""
        if self._given % self._every == 0:
            self._kept.append(np.array(picture))
        self._given += 1

    def close(self) -> None:
        """Writes the file, or removes it if there are no frames."""
        if not self._kept:
            self._video.unlink(missing_ok=True)
            return
        from PIL import Image

        ends = [100 * self._every * n // self._fps for n in range(len(self._kept) + 1)]
        delays = [10 * (end - begin) for begin, end in itertools.pairwise(ends)]
        first, *others = map(Image.fromarray, self._kept)
        duration = delays if others else delays[0]
        first.save(self._video, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
