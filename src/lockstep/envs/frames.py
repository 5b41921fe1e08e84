"""Joins the frames of a stack into one observation of one space.

Images become one image ``[H, W, k·C]`` and vectors one vector, oldest first. Of action masks and texts only the newest
is kept. Parts of other spaces stay a stack ``[k, …]``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from lockstep.core.spaces import ImageBox, channels_first, is_image, is_text


def stacked_space(single: Any, count: int, mask: str | None, name: str = "") -> gymnasium.Space:
    """Returns the space of what :func:`join_frames` makes of ``count`` frames; it takes the same arguments."""
    if isinstance(single, spaces.Dict):
        return spaces.Dict({k: stacked_space(s, count, mask, _inside(name, k)) for k, s in single.spaces.items()})
    if isinstance(single, spaces.Tuple):
        return spaces.Tuple([stacked_space(s, count, mask, _inside(name, n)) for n, s in enumerate(single.spaces)])
    if name and (name == mask or is_text(single)):
        return single
    if isinstance(single, spaces.MultiDiscrete):  # Gymnasium would batch these to a Box, without choices
        nvec, start = (np.stack([bound] * count) for bound in (single.nvec, single.start))
        return spaces.MultiDiscrete(nvec, start=start)
    stacked: Any = batch_space(single, count)
    if not isinstance(single, spaces.Box):
        return stacked
    low, high = (_joined(np, single, bound) for bound in (stacked.low, stacked.high))
    if is_image(single):
        return ImageBox(low, high, dtype=np.uint8, channels_first=False)
    return spaces.Box(low, high, dtype=stacked.dtype.type)


def with_plain_texts(single: gymnasium.Space) -> gymnasium.Space:
    """Replaces text spaces by Gymnasium's ``Text``, because its frame stack knows no other package's."""
    if isinstance(single, spaces.Dict):
        return spaces.Dict({k: with_plain_texts(s) for k, s in single.spaces.items()})
    if isinstance(single, spaces.Tuple):
        return spaces.Tuple([with_plain_texts(s) for s in single.spaces])
    return spaces.Text(1) if is_text(single) else single


def join_frames(xp: Any, single: Any, frames: Any, mask: str | None, name: str = "") -> Any:
    """Joins frames ``[k, …]`` into one observation, as this module describes.

    Args:
        xp: array namespace of the frames.
        single: space of one frame.
        frames: array, or (nested) dict or tuple of arrays, oldest first.
        mask: name of the action mask in a Dict, or None.
        name: path of ``single`` in the whole space.
    """
    if isinstance(single, spaces.Dict):
        return {k: join_frames(xp, s, frames[k], mask, _inside(name, k)) for k, s in single.spaces.items()}
    if isinstance(single, spaces.Tuple):
        return tuple(join_frames(xp, s, frames[n], mask, _inside(name, n)) for n, s in enumerate(single.spaces))
    if name and (name == mask or is_text(single)):
        return frames[-1]
    return _joined(xp, single, frames) if isinstance(single, spaces.Box) else frames


def _joined(xp: Any, single: spaces.Box, frames: Any) -> Any:
    if not is_image(single):
        return frames.reshape(-1)
    if len(single.shape) == 2:
        return xp.moveaxis(frames, 0, -1)
    if channels_first(single):
        return xp.moveaxis(frames.reshape(-1, *single.shape[1:]), 0, -1)
    return xp.moveaxis(frames, 0, 2).reshape(*single.shape[:2], -1)


def _inside(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)
