"""Applies the settings given for a resumed group to its runs; checks all of them before it writes any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.files import nested
from lockstep.config.redact import shown_url
from lockstep.config.run import Config, RunOptions
from lockstep.core.process import say
from lockstep.launch.resume import change_of_length, changes_of_order, open_directory, resumed_config
from lockstep.launch.seeds.making import config_of_seed
from lockstep.launch.seeds.places import in_its_place, own_places_of
from lockstep.runs.directory import LOCK, open_run, written_by_another
from lockstep.runs.finding import seeds_in
from lockstep.runs.lock import is_held
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import names_in

Change = tuple[Config, Config]
"""A run's stored config, and the one that replaces it."""


def settings_of_seeds(group: Path, config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a group's overrides mean for its runs, nested: without the seed, with their mirror.

    Args:
        group: its directory.
        config: of the group, with the overrides applied.
        overrides: nested or dotted.
    """
    settings = nested({name: value for name, value in overrides.items() if name != "seed"})
    if "mirror" in settings.get("checkpoint", {}):
        mirror = config_of_seed(group, config, config.seed).checkpoint.mirror
        settings["checkpoint"] = {**settings["checkpoint"], "mirror": mirror}
    if "reference" in settings.get("grpo", {}):
        settings["grpo"] = {**settings["grpo"], "reference": config.grpo.reference}  # the path, not the name
    return settings


def changed_seeds(group: Path, config: Config, overrides: Mapping[str, Any], options: RunOptions) -> dict[Path, Change]:
    """Finds the runs of a group whose configs its overrides change; arguments are as in :func:`settings_of_seeds`.

    Raises:
        ValueError: one of them can't be resumed with its new config, or another process writes it; one line, and
            nothing was written.
    """
    asked, changed = settings_of_seeds(group, config, overrides), dict[Path, Change]()
    like = config_of_seed(group, config, config.seed)
    named = names_in(like)  # runs may name what the group names
    configs = {run: stored_config(run, warn=False) for run in seeds_in(group)}
    own_places = own_places_of(group, configs.values())
    for run, stored in configs.items():
        before = stored.checkpoint.mirror
        is_own = before in own_places  # else the user gave it to this seed
        if not (settings := in_its_place(asked, before, like.checkpoint.mirror) if is_own else asked):
            continue
        own = resumed_config(run, settings, options.trust, warn=False, named=named)
        if own == stored:
            continue
        if is_held(run / LOCK):
            raise ValueError(f"run {run} {written_by_another(run)}")
        open_directory(own, options, run, None, writer=False)  # checks as for a single run
        changed[run] = stored, own
    return changed


def write_changes(changed: Mapping[Path, Change], trust: bool) -> None:
    """Writes the runs' new configs, all before any run is resumed, and says what changes."""
    for line in dict.fromkeys(line for change in changed.values() for line in _in_words(*change)):
        say(f"lockstep: {line}")
    for run, (_, config) in changed.items():
        open_run(run, config, trust).unlock()


def put_back(changed: Mapping[Path, Change]) -> None:
    """Writes the old configs back, because the group can't be resumed."""
    for run, (stored, _) in changed.items():
        with contextlib.suppress(ValueError):  # another process has resumed it meanwhile
            open_run(run, stored, trust=True).unlock()


def _in_words(stored: Config, config: Config) -> Iterable[str]:
    """Yields what a resumed run does differently from here on, in the words of a run that is resumed alone."""
    if stored.total_steps != config.total_steps:
        yield change_of_length(stored.total_steps, config)
    before, now = stored.checkpoint.mirror, config.checkpoint.mirror
    if before is not None and now is not None and before != now:
        stays = f"what is at {shown_url(before)} stays"
        yield f"checkpoint.mirror: seeds are copied to {shown_url(now)} from here on; {stays}"
    yield from changes_of_order(stored, config)
