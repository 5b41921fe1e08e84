"""Settings to start from for an environment without a preset, by its spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.presets import defaults_for, for_grpo
from lockstep.config.run import EnvConfig, RunOptions
from lockstep.envs.describe import describe
from lockstep.launch.jax_start import start_jax
from lockstep.runs.trackers.service import flattened


def defaults_by_spaces(env_id: str, given: Mapping[str, Any], options: RunOptions) -> tuple[dict[str, Any], str | None]:
    """Make the environment once, and choose defaults by its spaces.

    Args:
        env_id: of an environment without a preset.
        given: the settings that were given explicitly, nested.
        options: how the run is executed; JAX is set up for that if it has to look at the environment.

    Returns:
        Nested settings, and a line that says which of them stand because nobody gave others. Both are empty for an
        environment that can't be made: whoever makes it for the run says why.
    """
    env = {key: value for key, value in given.get("env", {}).items() if key != "id"}
    try:
        config = EnvConfig.model_validate(env | {"id": env_id})
        start_jax(config, given, options)
        description = describe(config)
    except ValueError:
        return {}, None
    images = bool(description.observation.image_bytes)
    settings, kind = defaults_for(continuous=not description.action.discrete, images=images)
    if not description.observation.vector_size and "observations" in settings.get("normalize", {}):
        settings["normalize"]["observations"] = False
    if given.get("algorithm") == "grpo":
        settings = for_grpo(env_id, settings)
    taken = {key: value for key, value in flattened(settings).items() if key not in flattened(given)}
    listed = ", ".join(f"{key} {value}" for key, value in taken.items())
    return settings, f"no preset for {env_id}: defaults for {kind}: {listed}" if taken else None
