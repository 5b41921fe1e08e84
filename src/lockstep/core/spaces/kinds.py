"""Classifies Gymnasium spaces: images or numbers, texts that rows leave out, numbers of choices."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class ImageBox(spaces.Box):
    """An image whose layout, ``[C, H, W]`` or ``[H, W, C]``, is given; a plain Box's is guessed from its shape."""

    def __init__(self, low: np.ndarray, high: np.ndarray, dtype: type, channels_first: bool) -> None:
        super().__init__(low, high, dtype=dtype)
        self.channels_first = channels_first


def is_image(space: spaces.Box) -> bool:
    """Whether a Box is treated as an image: uint8 with two or three axes."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3)


def channels_first(space: spaces.Box) -> bool:
    """Whether an image is ``[C, H, W]``: as an ImageBox says, else if the first axis is shorter than the others."""
    if isinstance(space, ImageBox):
        return space.channels_first
    return len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])


def is_text(space: gymnasium.Space) -> bool:
    """Whether a space holds strings: Text, or a package's own space."""
    return space.dtype is not None and space.dtype.kind == "U"


def texts_in(space: gymnasium.Space, name: str = "") -> tuple[str, ...]:
    """Returns the names of the parts of a Dict or Tuple that are text, which rows leave out."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return (name,) if name and is_text(space) else ()
    prefix = f"{name}/" if name else ""
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return tuple(text for key, part in parts for text in texts_in(part, f"{prefix}{key}"))


def choices_of(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the number of values of each index, and their lowest values."""
    sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return tuple(int(n) for n in np.ravel(sizes)), tuple(int(n) for n in np.ravel(space.start))
