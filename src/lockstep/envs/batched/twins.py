"""Finds the array environments that stand for Gymnasium's own of the same physics."""

from __future__ import annotations

from lockstep.config.run import Config, EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS

TWINS = {kind.gymnasium_id: key for key, kind in ARRAY_ENVIRONMENTS.items() if kind.gymnasium_id}
"""Keys of array environments by the Gymnasium id whose physics they have."""


def array_twin(env: EnvConfig) -> str | None:
    """The array environment that can stand for a Gymnasium id as it is configured, or None.

    There is none for an environment that is asked for by its back end, or with what only Gymnasium's own has:
    arguments, wrappers, worker processes.
    """
    plain = EnvConfig()
    own = ("kwargs", "backend", "action_mask", "frame_skip", "frame_stack", "sticky_actions", "atari", "workers")
    if any(getattr(env, name) != getattr(plain, name) for name in own):
        return None
    return TWINS.get(env.id)


def stepped_inside(config: Config) -> tuple[Config, str | None]:
    """A config whose environment the JAX engine steps inside its program where it can, and the line that says so."""
    twin = array_twin(config.env) if config.engine == "jax" else None
    if twin is None:
        return config, None
    line = (
        f"engine jax: {config.env.id} is stepped inside the compiled program as {twin} (the same physics in float32); "
        "--env.backend gymnasium steps Gymnasium's own"
    )
    return config.model_copy(update={"env": config.env.model_copy(update={"id": twin})}), line
