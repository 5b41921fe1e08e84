"""Finds the preset of an environment by its id, or defaults by its spaces if it has no preset."""

from __future__ import annotations

import copy
import re
from typing import Any

from lockstep.config.presets.arrays import ARRAYS
from lockstep.config.presets.classic import CLASSIC
from lockstep.config.presets.games import ATARI, ATARI_ID, GAMES, IMAGES
from lockstep.config.presets.grpo import GRPO, GRPO_PRESETS
from lockstep.config.presets.physics import MUJOCO, PHYSICS
from lockstep.config.sections import SHORT_IDS

PRESETS: dict[str, dict[str, Any]] = {**CLASSIC, **ARRAYS, **PHYSICS, **GAMES}

_DISCRETE: dict[str, Any] = {  # the config's own defaults
    "num_envs": 8,
    "num_steps": 128,
    "ppo": {"learning_rate": 3e-4, "num_epochs": 4, "num_minibatches": 4},
}


def with_version(env_id: str) -> str:
    """Appends the newest version to an id without one, as Gymnasium does; an unknown id is returned unchanged."""
    if re.search(r"-v\d+$", env_id) or ":" in env_id or env_id in PRESETS:
        return env_id
    import gymnasium  # slow to import, and other ids don't need it

    known = (name.rpartition("-v") for name in {*gymnasium.registry, *SHORT_IDS, *PRESETS})
    versions = [int(version) for name, _, version in known if name == env_id and version.isdigit()]
    return f"{env_id}-v{max(versions)}" if versions else env_id


def has_preset(env_id: str) -> bool:
    """Returns whether an environment has a preset of its own; ``module:Id-v0`` has that of ``Id-v0``."""
    return _preset(env_id) is not None


def _preset(env_id: str) -> dict[str, Any] | None:
    name = env_id.rpartition(":")[2] if ":" in env_id else SHORT_IDS.get(env_id, env_id)
    return PRESETS.get(name, ATARI if ATARI_ID.fullmatch(name) else None)


def preset_for(env_id: str) -> dict[str, Any]:
    """Returns the preset of an environment as nested settings, as in a config file; just its id if it has none."""
    settings = copy.deepcopy(_preset(env_id) or {})
    settings["env"] = {**settings.get("env", {}), "id": env_id}
    return settings


def for_grpo(env_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Turns an environment's settings for PPO into settings for GRPO.

    The ``env`` section, engine, length, networks and the normalisation of observations are kept; sizes and optimisation
    are GRPO's.
    """
    name = env_id.rpartition(":")[2]
    out = {key: value for key, value in settings.items() if key in ("env", "engine", "total_steps", "network")}
    if settings.get("normalize", {}).get("observations"):
        out["normalize"] = {"observations": True}
    return out | copy.deepcopy(GRPO_PRESETS.get(name, GRPO))


def defaults_for(continuous: bool, images: bool) -> tuple[dict[str, Any], str]:
    """Returns settings for an environment without a preset, chosen by its spaces, and a name for them."""
    if images:
        return copy.deepcopy(IMAGES), "image observations (as for Atari)"
    if continuous:
        return copy.deepcopy(MUJOCO), "continuous actions (as for MuJoCo)"
    return copy.deepcopy(_DISCRETE), "discrete actions"
