"""Registers the array environments with Gymnasium under their ids."""

from __future__ import annotations

import gymnasium

from lockstep.envs.arrays import ARRAY_ENVIRONMENTS


def register_array_environments() -> None:
    """Register each array environment with its time limit; ids that are there already stay as they are."""
    for env_id, environment in ARRAY_ENVIRONMENTS.items():
        if env_id in gymnasium.registry:
            continue
        gymnasium.register(
            id=env_id,
            entry_point="lockstep.envs.arrays.gymnasium_env:ArrayGymnasiumEnv",
            max_episode_steps=environment.max_episode_steps,
            kwargs={"array_environment": env_id},
        )
