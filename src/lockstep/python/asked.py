"""Collects the settings that ``lockstep.train`` and :meth:`lockstep.Run.resume` are given, as nested dicts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.config.files import lay_over, nested, read_file
from lockstep.config.on_off import switch
from lockstep.config.run import Config
from lockstep.core.errors import one_line
from lockstep.core.files import path_of
from lockstep.python.arguments import other_form, plain_containers

DEFAULTS = ("env", "engine", "nproc", "name", "runs_dir", "resume", "seeds", "quiet")
"""Parameters of ``lockstep.train`` whose default is None, of which a config or the command line decides then."""
SWITCHES = ("quiet", "trust")
"""Options that are on or off here, and no text, which the command line would read."""


def settings_asked(
    before: dict[str, Any], config: str | Path | Mapping[str, Any] | Config | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns nested settings: ``settings``, by keyword, over ``config``, over those of ``before``, which it changes.

    Arguments of :func:`lockstep.train` that are None, their default, say nothing.

    Raises:
        ValueError: an argument has no meaning in its place; one line that names it.
    """
    asked = lay_over(before, settings_of(config))
    given = {name: value for name, value in settings.items() if value is not None or name not in DEFAULTS}
    if given.get("seeds") is not None:
        asked.pop("seed", None)  # as a run's config has one
        given["seeds"] = _seeds(given["seeds"])
    for name in SWITCHES:
        if given.get(name) is not None:
            given[name] = switch(name, given[name])
    for name in ("runs_dir", "resume"):
        if given.get(name) is not None:
            given[name] = path_of(given[name])
    return lay_over(asked, nested(plain_containers(given)))


def _seeds(given: Any) -> str:
    """Returns seeds in the form that the command line takes."""
    if isinstance(given, str):
        return given
    if isinstance(given, Iterable):
        return ",".join(map(str, given))
    raise ValueError(f'seeds: {given!r} is no list of seeds; give range(5), [3, 7] or "0-4"')


def settings_of(config: str | Path | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """Returns the nested settings of a config in any form; raises a one-line ``ValueError`` if it is in none."""
    if config is None:
        return {}
    if not isinstance(config, str | PathLike | Mapping | Config):
        shown = one_line(repr(config))[:80]
        instead = other_form(config) or "; give a file's path, a mapping of settings, or a Config"
        raise ValueError(f"config: {shown} is no config{instead}")
    if isinstance(config, Config):
        return nested(config.model_dump(exclude_unset=True))
    if isinstance(config, Mapping):
        found = nested(plain_containers(config))
    else:
        found = read_file(Path(os.path.expanduser(config)))
    if isinstance(found.get("env"), str):
        found["env"] = {"id": found["env"]}
    return found
