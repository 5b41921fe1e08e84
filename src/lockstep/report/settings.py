"""Finds the settings in which a run differs from its preset, and settings and machines in which runs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.config.checks import resolve
from lockstep.config.files import layered
from lockstep.config.keys import validate
from lockstep.config.presets import defaults_for, for_grpo, has_preset, preset_for
from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.core.files import same_json
from lockstep.report.reading import RunFiles
from lockstep.runs.trackers.service import flattened
from lockstep.training.own_loss.recorded import told_apart

MISSING = "–"
ENVIRONMENT = "env.id"


def own_settings(run: RunFiles) -> tuple[str, list[tuple[str, Any, Any]]]:
    """Returns the settings of a run that differ from its preset's.

    Returns:
        What they are compared with, in words; and for each its key, the run's value and the preset's.
    """
    mine = flattened(shown_value(config_with_seeds(run)))
    defaults, words = _defaults(str(mine.get(ENVIRONMENT, "")), run)
    theirs = flattened(defaults)
    rows = [(key, value, theirs.get(key, MISSING)) for key, value in mine.items() if theirs.get(key, MISSING) != value]
    return words, [row for row in rows if row[0] != ENVIRONMENT]


def _defaults(env_id: str, run: RunFiles) -> tuple[dict[str, Any], str]:
    """Returns the resolved config that an environment would be trained with by default, and a name for it."""
    settings, words = preset_for(env_id), f"the preset of {env_id}"
    if not has_preset(env_id):
        settings, words = _by_spaces(run.environment)
    if run.config.get("algorithm") == "grpo":
        settings = for_grpo(env_id, settings) | {"algorithm": "grpo"}
    try:
        config = resolve(validate(Config, layered(settings, {"env": {"id": env_id}}), words))
    except ValueError:
        config, words = Config(), "the defaults"
    return config.model_dump(mode="json"), words


def _by_spaces(environment: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns defaults for an environment without a preset, by its spaces as far as a checkpoint describes them."""
    observation, action = environment.get("observation"), environment.get("action")
    if not isinstance(observation, dict) or not isinstance(action, dict):
        return {}, "the defaults"
    leaves = observation.get("leaves")
    kinds = {leaf.get("kind") for leaf in leaves if isinstance(leaf, dict)} if isinstance(leaves, list) else set()
    settings, words = defaults_for(continuous=action.get("kind") == "continuous", images="image" in kinds)
    if "vector" not in kinds and "observations" in settings.get("normalize", {}):
        settings["normalize"]["observations"] = False
    return settings, f"the defaults for {words}"


def in_full(config: dict[str, Any]) -> dict[str, Any]:
    """Completes a config with defaults for settings that its version didn't have; returns it unchanged if invalid."""
    try:
        return validate(Config, config, "config").model_dump(mode="json") if config else config
    except ValueError:
        return config


def config_with_seeds(run: RunFiles, full: bool = False) -> dict[str, Any]:
    """Returns a run's config, if ``full`` by :func:`in_full`; with several seeds, ``seed`` lists them all: ``0–4``."""
    config = in_full(run.config) if full else run.config
    if not run.seeds:
        return config
    return config | {"seed": seeds_in_words([seed.config.get("seed") for seed in run.seeds])}


def configs_of(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Returns runs' full configs by :func:`config_with_seeds`; different losses of one name get different names."""
    configs = [config_with_seeds(run, full=True) for run in runs]
    sections = [found if isinstance(found := config.get("ppo"), dict) else {} for config in configs]
    places = [(run.seeds or [run])[0].path for run in runs]
    losses = told_apart(list(zip(configs, places, strict=True)))
    return [
        config if name is None else config | {"ppo": section | {"loss": name}}
        for config, section, name in zip(configs, sections, losses, strict=True)
    ]


def seeds_in_words(seeds: Sequence[Any]) -> str:
    """Formats seeds as ``0–4`` if they are three or more consecutive numbers, else as ``0, 3, 7``."""
    whole = sorted(seed for seed in seeds if isinstance(seed, int))
    if len(whole) == len(seeds) > 2 and whole == list(range(whole[0], whole[0] + len(whole))):
        return f"{whole[0]}–{whole[-1]}"
    return ", ".join(str(seed) for seed in (whole if len(whole) == len(seeds) else seeds))


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Returns the settings in which configs differ: the key, and each config's value with secrets hidden."""
    each = [flattened(config) for config in configs]
    keys = list(dict.fromkeys(key for settings in each for key in settings))
    rows = [(key, [settings.get(key, MISSING) for settings in each]) for key in keys]
    apart = [(key, values) for key, values in rows if not all(same_json(value, values[0]) for value in values)]
    return [(key, [shown_value(value, key) for value in values]) for key, values in apart]


def facts_apart(names: Iterable[str], there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Says in which of the named facts two sessions differ, as far as both recorded them."""
    known = [name for name in names if name in there and name in here]
    return [
        f"{name} {there[name] or 'none'} there, {here[name] or 'none'} here"
        for name in known
        if there[name] != here[name]
    ]
