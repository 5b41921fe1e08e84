"""Registers MiniGrid's environments, and declares the cells of their views as indices."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import cast

import gymnasium
import numpy as np
from gymnasium import spaces

MINIGRID_ID = re.compile(r"(?:MiniGrid|BabyAI)-[\w-]+-v\d+")
"""Matches ids that MiniGrid registers."""


def register_minigrid(env_id: str) -> None:
    """Registers MiniGrid's environments.

    Raises:
        ValueError: MiniGrid isn't installed; one line.
    """
    if importlib.util.find_spec("minigrid") is None:
        raise ValueError(f"env.id: {env_id} needs minigrid, which isn't installed; pip install 'lockstep-rl[minigrid]'")
    import minigrid  # noqa: F401


class CellIndices(gymnasium.Wrapper):
    """Declares in the space that a view ``[W, H, 3]`` holds indices of object, colour and state; keeps observations.

    MiniGrid's own space declares pixels up to 255, as which the indices would be almost black.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        known = sys.modules["minigrid.core.constants"]
        counts = [len(known.OBJECT_TO_IDX), len(known.COLOR_TO_IDX), len(known.STATE_TO_IDX)]
        parts = cast(spaces.Dict, env.observation_space).spaces
        indices = spaces.MultiDiscrete(np.broadcast_to(counts, parts["image"].shape or ()))
        self.observation_space = spaces.Dict({**parts, "image": indices})


def with_cell_indices(env: gymnasium.Env) -> gymnasium.Env:
    """Wraps an environment of MiniGrid that shows its own view; returns any other, or a wrapped view, as it is."""
    kind, inner = getattr(sys.modules.get("minigrid.minigrid_env"), "MiniGridEnv", None), env.unwrapped
    own = kind is not None and isinstance(inner, kind) and env.observation_space is inner.observation_space
    return CellIndices(env) if own else env
