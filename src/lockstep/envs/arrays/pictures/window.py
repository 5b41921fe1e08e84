"""Shows pictures in a window; needs pygame, which is loaded with the first picture."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np


class Window:
    """A window that opens with its first picture, and shows at most ``fps`` of them a second."""

    def __init__(self, title: str, fps: int) -> None:
        self._title, self._fps = title, fps
        self._pygame: Any = None

    def show(self, picture: np.ndarray) -> None:
        """Shows a picture, uint8 ``[height, width, 3]``, and waits until the next one is due.

        Raises:
            gymnasium.error.DependencyNotInstalled: pygame isn't installed.
        """
        pygame = self._pygame or self._opened(picture.shape)
        pygame.event.pump()
        pygame.surfarray.blit_array(self._screen, picture.swapaxes(0, 1))
        pygame.display.flip()
        self._clock.tick(self._fps)

    def _opened(self, shape: tuple[int, ...]) -> Any:
        try:
            pygame = self._pygame = importlib.import_module("pygame")
        except ModuleNotFoundError:
            raise gymnasium.error.DependencyNotInstalled(
                "a window needs pygame; pip install 'lockstep-rl[classic-control]'"
            ) from None
        pygame.display.init()
        pygame.display.set_caption(self._title)
        self._screen = pygame.display.set_mode((shape[1], shape[0]))
        self._clock = pygame.time.Clock()
        return pygame

    def close(self) -> None:
        """Closes the window, if it is open."""
        if self._pygame is not None:
            self._pygame.display.quit()
            self._pygame = None
