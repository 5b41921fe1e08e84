"""Checks that a run names only code, files and services that this user has trained with, or has just named by hand.

A config names code as ``module:attribute``, which is imported and called, and with ``log.jsonl`` a file, which is
written. What users type or pass as a config file is their own choice, and goes into a list once they have trained with
it. A run directory may be a stranger's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from lockstep.config.redact import HIDDEN, shown_url, shown_value
from lockstep.config.run import Config
from lockstep.config.sections import SERVICES, LogConfig
from lockstep.core.private import home_place, make_private, only_we_write
from lockstep.core.user_code.handed import is_handed
from lockstep.runs.directory import CONFIG
from lockstep.runs.stored import stored_config

NO_NAME = re.compile(r"[^:]*|(?:https?|file|s3|gs|hf)://.*|[A-Za-z]:[\\/].*", re.DOTALL)
"""Matches text that doesn't count as ``module:attribute``: without a colon, a URL, or a path on a Windows drive."""
OWN_REGISTRY = "lockstep.envs:lockstep/"
"""Prefix of the array environments' ids at Gymnasium; it names our own registry, not a stranger's code."""
TRUSTED = "trusted_names"
TRUSTED_VARIABLE = "LOCKSTEP_TRUSTED"
"""Environment variable with the names, as JSON, that the parent process trusts beside those in the list."""
LOG, MIRROR = "log.jsonl", "checkpoint.mirror"
OF_TRAINING = ("ppo.loss", LOG, MIRROR, *(f"log.{service}" for service in SERVICES))
"""Settings whose names only training uses."""


def names_in(config: Config, unused: Collection[str] = ()) -> dict[str, str]:
    """Finds the code, the file to write and the places to send to that a config names, without the ``unused`` keys.

    Returns:
        By each name, the key of the setting that names it.
    """
    found: dict[str, str] = {}
    named = {"env.id": config.env.id, "network.custom": config.network.custom, "ppo.loss": config.ppo.loss}
    for key, text in ((key, name or "") for key, name in named.items()):
        if key in unused or is_handed(text):  # nothing is imported for it
            continue
        if ":" in text and not text.startswith(OWN_REGISTRY):  # imported, whatever is around the colon
            found.setdefault(text, key)
    free = {"env.kwargs": config.env.kwargs, "network.custom_kwargs": config.network.custom_kwargs}
    if "ppo.loss" not in unused:
        free["ppo.loss_kwargs"] = config.ppo.loss_kwargs
    for key, value in free.items():
        for text in _texts(value):
            if not (NO_NAME.fullmatch(text) or text.startswith(OWN_REGISTRY)):
                found.setdefault(text, key)
    for name, key in _places_in(config):
        if key not in unused:
            found[name] = key
    return found


def _places_in(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the file to write and the places to send to, each with the key that names it."""
    if config.log.jsonl is not None:
        yield config.log.jsonl, LOG
    for service in SERVICES:
        if getattr(config.log, service):
            yield place_of_service(config.log, service), f"log.{service}"
    if config.checkpoint.mirror is not None:
        yield config.checkpoint.mirror.rstrip("/"), MIRROR


def place_of_service(log: LogConfig, service: str) -> str:
    """Returns the list's name for where a service takes metrics: ``service:entity/project``."""
    return f"{service}:{'/'.join(filter(None, (log.entity, log.project)))}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def trusted_config(run: Path, trust: bool = False, unused: Collection[str] = ()) -> Config:
    """Reads the config of a run directory, and makes sure that it names only what this user has trained with.

    Args:
        run: the directory.
        trust: whether the user accepts, this once, everything that it names.
        unused: keys of settings whose names won't be used.

    Raises:
        ValueError: it can't be read, or names something else; one line.
    """
    config = stored_config(run)
    check_trusted(config, run / CONFIG, trust, unused=unused)
    return config


def check_trusted(
    config: Config,
    source: Path,
    trust: bool = False,
    given: Iterable[str] = (),
    named: Collection[str] = (),
    unused: Collection[str] = (),
) -> None:
    """Raises if a run names code, a file or a place to send to that this user hasn't trained with.

    Args:
        config: of the run.
        source: the file that contains it.
        trust: whether the user accepts everything, this once.
        given: keys of the settings that the user has given by hand.
        named: names that the user has given in another way.
        unused: keys of settings whose names won't be used.

    Raises:
        ValueError: it does; one line that says which, from where it would be imported, and what to do.
    """
    named_there = {} if trust else names_in(config, unused)
    found = {name: key for name, key in named_there.items() if not _is_given(key, given)}
    known = trusted_names() if found else set()
    for name, key in found.items():
        if name in known or name in named:
            continue
        what = "which would be written" if key == LOG else f"which would be imported {origin_of(name)}"
        what = "to which metrics would be sent" if key.removeprefix("log.") in SERVICES else what
        what = "to which the run would be copied" if key == MIRROR else what
        raise ValueError(
            f"{key}: {source} names {_shown(name, config, key)}, {what}, and you haven't trained with it on this "
            "account; look at it, then give --trust"
        )


def _shown(name: str, config: Config, key: str) -> str:
    """Returns a name for a message, hidden if the key of a free setting says that its value is secret."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    shown = shown_url(name)
    return shown if not isinstance(value, dict) or shown in _texts(shown_value(value)) else HIDDEN


def _is_given(key: str, given: Iterable[str]) -> bool:
    return any(each == key or each.startswith(f"{key}.") for each in given)


def origin_of(name: str) -> str:
    """Says from where a name's package or module would be imported, without importing anything."""
    found = PathFinder.find_spec(name.partition(":")[0].partition(".")[0])
    if found is None:
        return "from nowhere that Python looks"
    places = list(found.submodule_search_locations or ())
    return f"from {found.origin or (places[0] if places else 'Python itself')}"


# --- the list -------------------------------------------------------------------------------------------------------


def trusted_file() -> Path | None:
    """Returns the file that lists the names which this user has trained with, one a line; None without a home."""
    home = home_place("XDG_CONFIG_HOME", ".config")
    if home is None:
        return None
    return Path(os.path.realpath(Path(home, "lockstep", TRUSTED)))  # dotfiles may be links to elsewhere


_handed: set[str] = set()
"""Names that this process's parent handed over."""


def take_handed_over() -> None:
    """Takes the names that the parent process handed over out of the environment, so that children don't see them."""
    with contextlib.suppress(ValueError, TypeError):  # none of ours
        _handed.update(json.loads(os.environ.pop(TRUSTED_VARIABLE, "[]")))


def trusted_names() -> set[str]:
    """Returns the names that this user has trained with, and those that the parent process handed over."""
    return _listed_names() | _handed


def handed_over(names: Iterable[str]) -> dict[str, str]:
    """Returns the environment variable that makes a child process trust ``names`` and what this process was handed.

    It leaves out the names in the list, because a variable has no room for many; without others it is empty.
    """
    new = {*_handed, *names} - _listed_names()
    return {TRUSTED_VARIABLE: json.dumps(sorted(new))} if new else {}


def _listed_names() -> set[str]:
    """Reads the list; a list that others may write counts as empty."""
    if (file := trusted_file()) is None:
        return set()
    try:
        return (
            set(file.read_text(encoding="utf-8", errors="replace").splitlines())
            if only_we_write(file) and only_we_write(file.parent)
            else set()
        )
    except (OSError, ValueError):
        return set()


def remember_names(config: Config) -> None:
    """Adds to the list what a config names, unless it is there already; does nothing if no list can be kept."""
    new = [name for name in names_in(config) if name.isprintable()]
    if not new or not (new := [name for name in new if name not in _listed_names()]):
        return
    if (file := trusted_file()) is None:
        return
    try:
        if make_private(file.parent) and (only_we_write(file) or not file.exists()):
            with os.fdopen(
                os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8"
            ) as lines:
                lines.writelines(f"{name}\n" for name in new)
    except OSError:
        return
