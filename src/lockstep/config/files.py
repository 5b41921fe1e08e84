"""Reads and writes config files, and combines the nested dicts that they are read into."""

from __future__ import annotations

import copy
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lockstep.config.algorithms import CLIPPED
from lockstep.config.keys import FREE, FREE_NAMES, LEAVES, SECTIONS
from lockstep.config.redact import shown_value
from lockstep.config.switches import Switch, read_switch, switch_named
from lockstep.config.words import ALIASES, MEMORY, VALUES, WITH_MEMORY, plain
from lockstep.config.yaml_text import check_once, read_yaml, write_yaml

FILE_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
ENDINGS = f"a config file ends in {', '.join(FILE_SUFFIXES)}"
SPOKEN = {"true": True, "false": False, "none": None}
"""Words of the command line, with their values in a file."""
SHORTHANDS: dict[str, tuple[type, str]] = {"env.atari": (bool, "enabled"), "network.image": (str, "kind")}
"""Sections that a single value may stand for: the value's type, and its setting in the section."""
MOST_LEVELS = 100
TOO_DEEP = f"nested in more than {MOST_LEVELS} levels, or within itself"
LEFT_OUT = (SECTIONS | FREE) - {"env"}
"""Sections and free tables that a file may name with nothing in them; an environment is to be named in its own."""
OFF = "off"
"""A value of some settings, which YAML reads as false."""


def read_json(text: str) -> Any:
    """Parses JSON; raises a ``ValueError`` if it isn't valid or a mapping has a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_once([key for key, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def read_file(path: Path) -> dict[str, Any]:
    """Reads a YAML, JSON or TOML config file; keys may be nested or dotted.

    Raises:
        ValueError: the file is missing, is of another kind, doesn't parse, or gives a setting twice; one line.
    """
    if not os.path.isfile(path):  # False for a name that is too long, too
        raise ValueError(f"{path}: {_why_no_file(path)}")
    readers = {".toml": tomllib.loads, ".json": read_json, ".yaml": read_yaml, ".yml": read_yaml}
    if not names_config(path):
        raise ValueError(f"{path}: {ENDINGS}")
    try:
        values = readers[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))  # editors on Windows add the mark
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: {TOO_DEEP}") from None
    if values is None:
        raise ValueError(f"{path}: holds no settings; write env: CartPole-v1, or the like, into it")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a config is a mapping of keys to values, not {type(values).__name__}")
    try:
        return nested(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def names_config(path: Path) -> bool:
    """Tells whether a path has a config file's suffix, in letters of either case; there needn't be such a file."""
    return path.suffix.lower() in FILE_SUFFIXES


def _why_no_file(path: Path) -> str:
    """Says why a path is no file that can be read, and which config file beside it has nearly its name."""
    if os.path.isdir(path):
        return "a directory, not a config file"
    if os.path.exists(path):
        return "no regular file; write the config into one"
    if os.path.islink(path):
        return f"a link to {os.readlink(path)}, which isn't there"
    siblings = [p.name for p in path.parent.glob("*") if names_config(p)] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, 1, 0.6)
    return "no such config file" + (f"; did you mean {path.parent / close[0]}?" if close else "")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns dotted keys into nested dicts, and aliases, at the top or in their section, into the settings they mean.

    Raises:
        ValueError: a setting is given under two names, or beside a switch for it, with different values; or a key isn't
            text; one line.
    """
    switches: list[Switch] = []
    section = values.get("network")
    memory = MEMORY in values or (isinstance(section, Mapping) and "recurrent" in section)
    out = _nested(values, "", {}, switches, ALIASES | WITH_MEMORY if memory else ALIASES)
    add_switches(out, switches)
    return out


def _nested(
    values: Mapping[str, Any],
    prefix: str,
    said: dict[str, tuple[str, Any]],
    switches: list[Switch],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    """Does this below a prefix, and collects switches in ``switches``.

    ``said`` maps the path of each setting given so far to its name and value.
    """
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        word = switch_named(prefix + name) if isinstance(value, bool) else None
        switch = None if word is None else read_switch(word, value, f"{prefix}{name}: {value}")
        if switch is not None:
            switches.append(switch)
            continue
        if value is None and prefix + name in LEFT_OUT:
            continue
        path = _unaliased(name, prefix, aliases)
        kind, inside = SHORTHANDS.get(prefix + path, (None, ""))
        if kind is not None and isinstance(value, kind):
            path = f"{path}.{inside}"
        if prefix.count(".") > MOST_LEVELS:
            raise ValueError(f"{prefix.partition('.')[0]}: {TOO_DEEP}")
        if isinstance(value, Mapping) and prefix + path not in FREE:
            path, found = name, _nested(value, f"{prefix}{name}.", said, switches, aliases)
        else:
            found = in_our_words(prefix + path, value)
            check_keys(prefix + path, found)
            _check_alone(prefix + path, prefix + name, found, said)
        merge(out, nest(path.split("."), found))
    return out


def _check_alone(path: str, name: str, value: Any, said: dict[str, tuple[str, Any]]) -> None:
    """Refuses a setting that was given before under another name with another value."""
    before, other = said.setdefault(path, (name, value))
    if str(other) != str(value) and not _are_equal_numbers(other, value):
        given = f"{name} {shown_value(value, path)} given together with {before} {shown_value(other, path)}"
        raise ValueError(f"{given}; give one")


def check_keys(path: str, value: Any, levels: int = MOST_LEVELS) -> None:
    """Refuses what JSON, by which a value reaches a resumed run and other ranks, can't hold.

    Raises:
        ValueError: a key isn't text, or the value is nested in more than ``levels`` or within itself; one line.
    """
    if levels < 0:
        raise ValueError(f"{'.'.join(path.split('.')[:2])}: {TOO_DEEP}")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path}: key {key!r} is {type(key).__name__}; keys are text, {str(key)!r}")
            check_keys(f"{path}.{key}", inner, levels - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_keys(path, inner, levels - 1)


def _are_equal_numbers(first: Any, second: Any) -> bool:
    return isinstance(first, int | float) and isinstance(second, int | float) and first == second


def add_switches(settings: dict[str, Any], switches: Sequence[Switch]) -> None:
    """Adds the settings of switches to the settings that were given beside them, in place.

    Raises:
        ValueError: a switch and a setting contradict each other; one line.
    """
    for switch in switches:
        if not switch.path:
            continue
        section, name = _section(settings, switch.path), switch.path.rpartition(".")[2]
        if name in section and not _agree(switch.value, section[name]):
            other = "none" if section[name] is None else section[name]
            raise ValueError(f"{switch.words} given together with {switch.path} {other}; give one")
        merge(settings, nest(switch.path.split("."), SPOKEN.get(switch.value, switch.value)))


def _agree(said: str, other: Any) -> bool:
    """Returns whether a switch's value equals that of its setting, as a file or the command line gives it."""
    spoken = str(other).lower()
    return spoken != "none" if said == CLIPPED else spoken == said


def _unaliased(name: str, prefix: str, aliases: Mapping[str, str]) -> str:
    """Returns the key, below a prefix, that a name stands for: another library's word, or our own in capitals.

    Any other name is returned unchanged.
    """
    if prefix + name in LEAVES:
        return name
    full = aliases.get(plain(name), "")
    if full.startswith(prefix) and full:
        return full.removeprefix(prefix)
    return plain(name) if prefix + plain(name) in LEAVES else name


def in_our_words(path: str, value: Any) -> Any:
    """Replaces a value that has another name elsewhere (``precision: amp``), and YAML's false if it means ``off``."""
    if value is False and path in LEAVES and OFF in typing.get_args(LEAVES[path].annotation):
        return OFF
    return VALUES.get(path, {}).get(value, value) if isinstance(value, str) else value


def nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Nests a value in one dict per word of its path."""
    for part in reversed(path):
        value = {part: value}
    return value


def merge(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested dicts into ``base``, in place, and returns it; ``env.kwargs`` and the like are replaced whole."""
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict) and key not in FREE_NAMES:
            merge(base[key], value)
        elif key != "value_clip_range" or value != CLIPPED or base.get(key) is None:  # else it is clipped by a number
            base[key] = value
    return base


TURNS = (
    ("num_envs", "num_envs_per_rank"),
    ("total_steps", "total_iterations"),
    ("ppo.num_minibatches", "ppo.batch_size"),
)
"""Pairs of settings that say the same in two ways: a layer that gives one removes the other from the layers below."""


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings, later layers over earlier ones; of each pair in :data:`TURNS` one is left.

    Raises:
        ValueError: a layer gives both settings of a pair; one line.
    """
    out: dict[str, Any] = {}
    for layer in layers:
        lay_over(out, copy.deepcopy(layer))
    return out


def lay_over(below: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings over those ``below``, in place, as :func:`layered` does; returns ``below``.

    Raises:
        ValueError: the layer gives both settings of a pair in :data:`TURNS`; one line.
    """
    for pair in TURNS:
        given = [_found(layer, key) for key in pair]
        if None not in given and pair[0] != "num_envs":  # checked where the number of ranks is known
            raise ValueError(f"{pair[1]}: {given[1]} given together with {pair[0]} {given[0]}; give one")
        for value, other in zip(given, reversed(pair), strict=True):
            if value is not None and _found(layer, other) is None:
                _section(below, other).pop(other.rpartition(".")[2], None)
    return merge(below, layer)


def _section(settings: Mapping[str, Any], key: str) -> Any:
    section, _, _ = key.rpartition(".")
    found = settings.get(section, {}) if section else settings
    return found if isinstance(found, Mapping) else {}


def _found(settings: Mapping[str, Any], key: str) -> Any:
    return _section(settings, key).get(key.rpartition(".")[2])


PRESET_NUMBERS = ("num_envs", "env.max_episode_steps", "ppo.value_clip_range")
"""Settings that are None by default but a number in some presets, so that a file must write their None."""


def config_text(config: BaseModel) -> str:
    """Writes a config as YAML that a command can read, without what is None by default and in all presets."""
    values = _said(config)
    for instead_of, given in TURNS:
        if _found(values, given) is not None:
            _section(values, instead_of).pop(instead_of.rpartition(".")[2], None)
    return write_yaml(values)


def _said(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    values = section.model_dump(mode="json")
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            values[name] = _said(value, f"{prefix}{name}.")
        elif value is None and info.default is None and prefix + name not in PRESET_NUMBERS:
            del values[name]
    return values
