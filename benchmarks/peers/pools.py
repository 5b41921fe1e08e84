"""EnvPool's pool of a benchmark case's environments."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from settings import Settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import envpool


def make_pool(settings: Settings) -> Any:
    """Makes a pool that steps all environments at once, on as many threads as the case has cores.

    Atari's games have EnvPool's own preprocessing, set to what ``AtariWrapper`` does.
    """
    name, extras = settings.env, {}
    if settings.images:
        name = name.replace("NoFrameskip-v4", "-v5")
        extras = {"episodic_life": True, "reward_clip": True, "use_fire_reset": True, "repeat_action_probability": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds in float64
        return envpool.make(
            name,
            env_type="gymnasium",
            num_envs=settings.num_envs,
            num_threads=settings.threads,
            seed=1,
            **extras,
        )


def as_pool_actions(actions: np.ndarray) -> np.ndarray:
    """Actions of the type that EnvPool insists on."""
    return actions.astype(np.int32 if np.issubdtype(actions.dtype, np.integer) else np.float64)
