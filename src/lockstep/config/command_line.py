"""Reads the command line of ``lockstep train``, on top of presets and config files.

Later sources override earlier ones: defaults, the preset of the environment, the file, the command line. Reading them
makes no environment; settings that depend on one are added by :mod:`lockstep.launch.request`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.algorithms import check_read_by_grpo, check_read_by_ppo
from lockstep.config.files import (
    ENDINGS,
    TOO_DEEP,
    add_switches,
    check_keys,
    in_our_words,
    layered,
    merge,
    names_config,
    nest,
    read_file,
    read_json,
)
from lockstep.config.keys import LEAVES, Leaf, check_no_booleans, negated, validate, validate_completed
from lockstep.config.presets import for_grpo, preset_for, with_version
from lockstep.config.redact import without_secrets
from lockstep.config.run import AUTO, Config, RunOptions
from lockstep.config.switches import Switch, switch_in
from lockstep.config.words import ALIASES, CONFIG_FILE, SHORT, advice, plain, spelled_out
from lockstep.core.files import quoted

ASSIGNMENT = re.compile(r"\+{0,2}[A-Za-z_][\w.-]*=")
"""``key=value``, which means ``--key value``."""


def _leaf_of(flag: str, value: str) -> tuple[Leaf, bool]:
    """Returns the setting that ``--flag`` names, and whether it is negated (``--no-quiet``, ``--log.no-jsonl``)."""
    name = flag[2:].replace("-", "_")
    if name not in LEAVES:
        name = ALIASES.get(plain(flag), plain(flag) if plain(flag) in LEAVES else name)
    if name in LEAVES:
        return LEAVES[name], False
    group, _, last = name.rpartition(".")
    aliased = ALIASES.get(last, "")
    if group and aliased.startswith(f"{group}."):
        return LEAVES[aliased], False
    positive = f"{group}.{last[3:]}" if group else ALIASES.get(last[3:], last[3:])
    if last.startswith("no_") and positive in LEAVES and LEAVES[positive].kind == "flag":
        return LEAVES[positive], True
    said = advice(flag, value) or advice("--" + last.removeprefix("no_").replace("_", "-"), value)
    if said is not None:
        raise ValueError(said)
    flags = ["--help", "--help-all", *("--" + path.replace("_", "-") for path in [*LEAVES, *ALIASES])]
    close = difflib.get_close_matches(flag, flags, 1, 0.6)
    meant = negated(close[0]) if close and "no_" in (name[:3], last[:3]) else "".join(close)
    raise ValueError(
        f"{flag}: unknown option{f'; did you mean {meant}?' if meant else ''} (lockstep train --help-all lists all)"
    )


def _value(leaf: Leaf, flag: str, words: list[str]) -> Any:
    if leaf.kind == "json":
        try:
            value = read_json(words[0])
        except RecursionError:
            raise ValueError(f"{flag}: {TOO_DEEP}") from None
        except json.JSONDecodeError:
            shown = without_secrets([words[0]])[0]
            example = '{"g": 9.8}' if leaf.path == "env.kwargs" else '{"name": 0.1}'
            raise ValueError(f"{flag}: {shown!r} is not JSON, e.g. '{example}'") from None
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
        check_keys(leaf.path, value)
        return value
    if leaf.path == "log.tags":
        words = [part for word in words for part in _tags_in(word)]
    elif leaf.kind == "list":
        words = [part for word in words for part in word.strip("[]()").replace(",", " ").split()]
    kept = leaf.path == "log.tags" and len(words) > 1  # none beside others is a tag like them
    values = [None if not kept and w.lower() in ("none", "null") else w for w in words]
    if leaf.kind == "list":
        return None if values == [None] and leaf.optional else values
    return in_our_words(leaf.path, values[0])


def _tags_in(word: str) -> list[str]:
    """Splits a word at its commas; a tag may hold spaces and brackets, which only those around a list lose."""
    listed = word == "[]" or (word.startswith("[") and word.endswith("]") and "," in word)
    return [tag.strip() for tag in (word[1:-1] if listed else word).split(",") if tag.strip()]


class _Words:
    """The words of a command line that haven't been read yet."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.left = spelled_out(argv)

    def next(self) -> tuple[str, str | None]:
        """Takes an option and the value in the same word, if there is one, or a positional word."""
        word = self.left.pop(0)
        if not word.startswith("--") and ASSIGNMENT.match(word) and not os.path.exists(word):
            word = "--" + word.lstrip("+")
        if not word.startswith("--"):
            return word, None
        flag, equals, inline = word.partition("=")
        return flag, inline if equals else None

    def values(self, most: int) -> list[str]:
        """Takes up to ``most`` words that aren't options."""
        taken: list[str] = []
        while self.left and len(taken) < most and not self.left[0].startswith("--"):
            if taken and ASSIGNMENT.match(self.left[0]):
                break
            taken.append(self.left.pop(0))
        return taken

    def truth(self) -> str:
        """Takes the next word if it is ``true`` or ``false``; otherwise returns ""."""
        spoken = bool(self.left) and self.left[0].lower() in ("true", "false")
        return self.left.pop(0) if spoken else ""


@dataclass(frozen=True)
class Part:
    """An option of a command line: its words, its setting's path, and the value; any other word has no path."""

    words: list[str]
    path: str
    value: Any


def parts_of(argv: Sequence[str]) -> Iterator[Part]:
    """Yields the options and words of a command line; raises the errors of :func:`parse_arguments`."""
    words = _Words(argv)
    while words.left:
        before = words.left.copy()
        path, value = _taken(words)
        yield Part(before[: len(before) - len(words.left)], path, value)


def _taken(words: _Words) -> tuple[str, Any]:
    """Takes the next part; returns its path and value."""
    flag, inline = words.next()
    if not flag.startswith("--"):
        return "", flag
    if plain(flag) in CONFIG_FILE:
        return "", inline if inline is not None else _needed(flag, words.values(1))[0]
    switch = switch_in(flag, inline, words.truth)
    if switch is not None:
        return "", switch
    following = words.left[0] if words.left and not words.left[0].startswith("--") else ""
    leaf, negated = _leaf_of(flag, inline if inline is not None else following)
    if leaf.kind == "flag":
        if negated and inline is not None:
            raise ValueError(f"{flag}: takes no value; {flag} alone says false")
        return leaf.path, "false" if negated else (words.truth() or "true") if inline is None else inline
    most = len(words.left) if leaf.kind == "list" else 1
    given = [inline] if inline is not None else _needed(flag, words.values(most), leaf.kind == "list")
    return leaf.path, _value(leaf, flag, given)


def parse_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Splits a command line into positional words and nested settings, which are validated later.

    An unknown option, or one without its value, is a one-line ``ValueError`` with the nearest option.
    """
    positional: list[str] = []
    settings: dict[str, Any] = {}
    switches: list[Switch] = []
    for part in parts_of(argv):
        if part.path:
            merge(settings, nest(part.path.split("."), part.value))
        elif isinstance(part.value, Switch):
            switches.append(part.value)
        else:
            positional.append(part.value)
    add_switches(settings, switches)
    return positional, settings


def _needed(flag: str, values: list[str], several: bool = False) -> list[str]:
    if not values:
        raise ValueError(f"{flag}: needs a value{f'; {flag}=[] is a list of none' if several else ''}")
    return values


# --- together ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Holds what the user asked for, before the environment is looked at.

    ``config`` combines all sources. The nested settings of each source stand beside it: ``preset`` those of the
    environment's preset, ``file`` those of a config, a run directory or an environment id, ``given`` those of the
    command line. ``run`` is the run directory that ``file`` is from, if it is from one.
    """

    config: Config
    options: RunOptions
    preset: dict[str, Any]
    file: dict[str, Any]
    given: dict[str, Any]
    run: Path | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings that were given explicitly, in the file or over it on the command line."""
        return layered(self.file, self.given)

    def config_over(self, defaults: Mapping[str, Any]) -> Config:
        """Validates the config again, with ``defaults`` below all other settings."""
        return validate(Config, layered(defaults, self.preset, self.file, self.given), "command line")


def base_settings(target: str | None) -> tuple[dict[str, Any], str | None]:
    """Reads the settings of a config file, a run directory or an environment id.

    Returns:
        Nested settings, and the file that they were read from, or None.
    """
    if target is None:
        return {}, None
    target = os.path.expanduser(target)
    path = Path(target)
    if names_config(path):
        return read_file(path), target
    if os.path.isfile(path / "config.json"):
        return read_file(path / "config.json"), str(path / "config.json")
    if path.parent.name == "checkpoints" and os.path.isdir(path):
        raise ValueError(f"{target} is a checkpoint; --resume {quoted(target)} continues from it")
    if (path.is_absolute() or path.suffix) and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{target}: {ENDINGS}")
    return {"env": {"id": target}}, None


def _validated(model: Any, below: dict[str, Any], given: dict[str, Any], file: str | None) -> Any:
    """Validates a file's settings, if there is a file, together with the command line's, if it gives any."""
    if file is None:
        return validate(model, layered(below, given), "command line")
    return validate_completed(model, layered(below, given), below, file) if given else validate(model, below, file)


def _env_id(*layers: Mapping[str, Any]) -> str | None:
    found = None
    for layer in layers:
        env = layer.get("env")
        found = (env.get("id") if isinstance(env, Mapping) else env) or found
    return found


def _complete_id(layer: dict[str, Any]) -> None:
    """Writes an environment's id in its section, with its version."""
    if isinstance(layer.get("env"), str):
        layer["env"] = {"id": layer["env"]}
    env = layer.get("env")
    if isinstance(env, dict) and isinstance(env.get("id"), str):
        env["id"] = with_version(env["id"])


def _one_target(positional: list[str], given: dict[str, Any]) -> list[str]:
    """Returns the config file alone if an environment id stands beside it; ``given`` then gets the id as an option."""
    files = [word for word in positional if names_config(Path(word))]
    if len(positional) == 2 and len(files) == 1 and _env_id(given) is None:
        (env_id,) = (word for word in positional if word not in files)
        if not os.path.exists(env_id):
            merge(given, {"env": {"id": env_id}})
            return files
    if "=" in positional:
        raise ValueError(f"{' '.join(positional)}: a key, = and its value are one word, without spaces: key=value")
    for word in positional:
        if word.startswith("-"):
            short = SHORT.get(word)
            instead = f"write {short}" if short else "options have two dashes (lockstep train --help)"
            raise ValueError(f"{word}: unknown option; {instead}")
    if len(positional) > 1:
        raise ValueError(f"{positional[1]!r}: one config file or environment id is enough")
    return positional


def _one_environment(
    positional: list[str], file: str | None, settings: Mapping[str, Any], from_words: Mapping[str, Any]
) -> None:
    """Refuses two environments on one command line; only the environment of a file may be replaced."""
    first, second = _env_id(settings), _env_id(from_words)
    if positional and file is None and second not in (None, first):
        raise ValueError(f"{first!r} and --env-id {second!r} are two environments; give one")


def read_request(argv: Sequence[str], needs_env: bool = True) -> Request:
    """Reads the config and options of ``lockstep train ARGV``; unless ``needs_env``, the environment may be missing.

    Raises a one-line ``ValueError`` with the key, the value and what would work if something is wrong.
    """
    positional, from_words = parse_arguments(argv)
    positional = _one_target([os.path.expanduser(word) for word in positional], from_words)
    settings, file = base_settings(positional[0] if positional else None)
    for layer in (settings, from_words):
        _complete_id(layer)
    _one_environment(positional, file, settings, from_words)
    try:
        check_no_booleans(settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    options_in_file = {k: settings.pop(k) for k in list(settings) if k in RunOptions.model_fields}
    run = Path(file).parent if file is not None and file != positional[0] else None
    for key in options_in_file if run is not None else ():
        raise ValueError(f"{key}: {file} is the config of a run, which doesn't say how and where another is run")
    options_given = {k: v for k, v in from_words.items() if k in RunOptions.model_fields}
    if "seeds" in options_given:
        settings.pop("seed", None)  # a run's config has one
    for one, other in (("seeds", "num_seeds"), ("num_seeds", "seeds")):
        if options_given.get(one) is not None:
            options_in_file.pop(other, None)
    if options_given.get("resume") not in (None, AUTO):
        options_in_file.pop("name", None)  # of the run that the file began
    given = {k: v for k, v in from_words.items() if k in Config.model_fields}
    options = _validated(RunOptions, options_in_file, options_given, file if options_in_file else None)
    env_id = _env_id(settings, given)
    starts = needs_env and options.resume in (None, AUTO) and env_id is None
    if starts and not positional:
        raise ValueError("a config file or an environment id is needed, e.g. lockstep train CartPole-v1")
    preset = preset_for(env_id) if isinstance(env_id, str) else {}
    if isinstance(env_id, str) and given.get("algorithm", settings.get("algorithm")) == "grpo":
        preset = for_grpo(env_id, preset)
    config = _validated(Config, layered(preset, settings), given, file)
    if starts:
        raise ValueError(f"{file}: names no environment; write env: CartPole-v1, or give --env-id CartPole-v1")
    if config.algorithm == "grpo" and run is None:
        check_read_by_grpo(layered(settings, given).get("ppo"))
    if config.algorithm == "ppo" and run is None and options.resume in (None, AUTO):
        file_is_for_grpo = "algorithm" in given and settings.get("algorithm") == "grpo"
        check_read_by_ppo((given if file_is_for_grpo else layered(settings, given)).get("grpo"), config.grpo)
    return Request(config, options, preset, settings, given, run)
