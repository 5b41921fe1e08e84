"""Finds the array environment that has the physics of a Gymnasium environment."""

from __future__ import annotations

from lockstep.config.run import Config, EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS

TWINS = {kind.gymnasium_id: key for key, kind in ARRAY_ENVIRONMENTS.items() if kind.gymnasium_id}
"""Maps Gymnasium ids to the keys of array environments with the same physics."""


def array_twin(env: EnvConfig) -> str | None:
    """Returns the array environment that can replace a Gymnasium id as it is configured, or None.

    There is none if the config names a back end, or uses what only Gymnasium's own environment has: arguments,
    wrappers, worker processes.
    """
    plain = EnvConfig()
    own = ("kwargs", "backend", "action_mask", "frame_skip", "frame_stack", "sticky_actions", "atari", "workers")
    if any(getattr(env, name) != getattr(plain, name) for name in own):
        return None
    return TWINS.get(env.id)


def with_array_twin(config: Config) -> tuple[Config, str | None]:
    """Replaces the environment by its array twin, if the JAX engine can step that inside its program.

    Returns:
        The config, and the line that announces the change; None if nothing changed.
    """
    twin = array_twin(config.env) if config.engine == "jax" else None
    if twin is None:
        return config, None
    line = (
        f"engine jax: {config.env.id} is stepped inside the compiled program as {twin} (the same physics in float32); "
        "--env.backend gymnasium steps Gymnasium's own"
    )
    return config.model_copy(update={"env": config.env.model_copy(update={"id": twin})}), line
