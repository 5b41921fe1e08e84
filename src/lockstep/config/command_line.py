"""Where a config comes from: presets, YAML/JSON/TOML files and the command line, one validator for all.

Later sources override earlier ones: defaults, the preset of the environment, the file, the command line.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.keys import ALIASES, FREE, FREE_NAMES, LEAVES, Leaf, validate
from lockstep.config.presets import for_grpo, has_preset, preset_for
from lockstep.config.run import Config, RunOptions

FILE_SUFFIXES = (".yaml", ".yml", ".json", ".toml")

SWITCHES = {"--amp": ("precision", "bf16"), "--no-amp": ("precision", "fp32")}
"""Options without a value that stand for a value of another."""


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML, JSON or TOML config file; keys may be nested or dotted.

    Raises:
        ValueError: the file is missing, of another kind, or doesn't parse; one line that says so.
    """
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in FILE_SUFFIXES] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, 1, 0.6)
        raise ValueError(
            f"{path}: no such config file" + (f"; did you mean {path.parent / close[0]}?" if close else "")
        )
    readers = {".toml": tomllib.loads, ".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise ValueError(f"{path}: a config file ends in {', '.join(FILE_SUFFIXES)}")
    try:
        values = readers[path.suffix](path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a config is a mapping of keys to values, not {type(values).__name__}")
    return nested(values)


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys as nested dicts; at the top, aliases as the names they stand for."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        path = name if prefix or isinstance(value, dict) else ALIASES.get(name, name)
        inner = isinstance(value, dict) and prefix + path not in FREE
        merge(out, _nest(path.split("."), nested(value, f"{prefix}{path}.") if inner else value))
    return out


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def merge(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Overlay nested dicts in place; ``env.kwargs`` and its like are replaced whole; returns ``base``."""
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict) and key not in FREE_NAMES:
            merge(base[key], value)
        else:
            base[key] = value
    return base


# --- command line -----------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    """What a command line says: positional words, and settings as nested dicts."""

    positional: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def _leaf_of(flag: str) -> tuple[Leaf, bool]:
    """The setting that ``--flag`` names, and whether it is negated (``--no-quiet``, ``--log.no-tensorboard``)."""
    name = flag[2:].replace("-", "_")
    name = ALIASES.get(name, name)
    if name in LEAVES:
        return LEAVES[name], False
    group, _, last = name.rpartition(".")
    positive = f"{group}.{last[3:]}" if group else last[3:]
    if last.startswith("no_") and positive in LEAVES and LEAVES[positive].kind == "flag":
        return LEAVES[positive], True
    flags = ["--" + path.replace("_", "-") for path in [*LEAVES, *ALIASES]]
    alias = ALIASES.get(last)
    same_group = alias is not None and group and alias.startswith(f"{group}.")
    close = ["--" + alias.replace("_", "-")] if alias and same_group else difflib.get_close_matches(flag, flags, 1, 0.6)
    raise ValueError(
        f"{flag}: unknown option{f'; did you mean {close[0]}?' if close else ''} (lockstep train --help lists all)"
    )


def _value(leaf: Leaf, flag: str, words: list[str]) -> Any:
    if leaf.kind == "json":
        try:
            return json.loads(words[0])
        except ValueError:
            raise ValueError(f"{flag}: {words[0]!r} is not JSON, e.g. '{{\"g\": 9.8}}'") from None
    values = [None if w.lower() in ("none", "null") else w for w in words]
    if leaf.kind == "list" and values == [None] and leaf.optional:
        return None
    if leaf.kind == "list":
        return [part for w in words for part in w.split(",") if part]
    return values[0]


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split a command line into positional words and settings; values are checked later, by the config itself.

    Raises:
        ValueError: an unknown option or a missing value, in one line with the nearest option.
    """
    out, words = Arguments(), list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            out.positional.append(word)
            continue
        if word.partition("=")[0] in SWITCHES:
            if "=" in word:
                raise ValueError(f"{word}: takes no value; {word.partition('=')[0]} alone says it")
            out.settings |= dict([SWITCHES[word]])
            continue
        flag, _, inline = word.partition("=")
        leaf, negated = _leaf_of(flag)
        given = [inline] if "=" in word else []
        if leaf.kind == "flag":
            if not given and words and words[0].lower() in ("true", "false"):
                given = [words.pop(0)]
            if negated and given:
                raise ValueError(f"{flag}: takes no value; {flag} alone says false")
            value: Any = (given[0] if given else "true") if not negated else "false"
        else:
            takes = len(words) if leaf.kind == "list" else 1
            while "=" not in word and words and len(given) < takes and not words[0].startswith("--"):
                given.append(words.pop(0))
            if not given:
                raise ValueError(f"{flag}: needs a value")
            value = _value(leaf, flag, given)
        merge(out.settings, _nest(leaf.path.split("."), value))
    return out


# --- together ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        config: the settings of all sources.
        options: how and where it is run.
        overrides: the settings that were given explicitly.
        note: what was decided for the user, a line each: defaults for an environment without a preset, an array
            environment in place of Gymnasium's; else None.
    """

    config: Config
    options: RunOptions
    overrides: dict[str, Any]
    note: str | None = None


def base_settings(target: str | None) -> tuple[dict[str, Any], str]:
    """The settings of a config file, a run directory or an environment id, and what to call their source."""
    if target is None:
        return {}, "command line"
    path = Path(target)
    if path.suffix in FILE_SUFFIXES:
        return read_file(path), target
    if path.is_dir() and (path / "config.json").is_file():
        return read_file(path / "config.json"), str(path / "config.json")
    if path.is_dir() and path.parent.name == "checkpoints":
        raise ValueError(f"{target} is a checkpoint; --resume {target} continues from it")
    return {"env": {"id": target}}, target


def _no_booleans(values: Any, path: str = "") -> None:
    """A YAML ``true`` where a number is wanted would quietly be 1."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        inner = f"{path}{key}"
        if isinstance(value, bool) and inner in LEAVES and LEAVES[inner].kind != "flag":
            raise ValueError(f"{inner}: {value}: a number or text is wanted here, not true or false")
        if inner not in FREE:
            _no_booleans(value, f"{inner}.")


def _layer(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    if overlay.get("num_envs_per_rank") is not None and "num_envs" not in overlay:
        base = {k: v for k, v in base.items() if k != "num_envs"}
    if overlay.get("num_envs") is not None and "num_envs_per_rank" not in overlay:
        base = {k: v for k, v in base.items() if k != "num_envs_per_rank"}
    return merge(base, overlay)


def _env_id(*layers: Mapping[str, Any]) -> str | None:
    found = None
    for layer in layers:
        env = layer.get("env")
        found = (env.get("id") if isinstance(env, Mapping) else env) or found
    return found


def read_request(argv: Sequence[str], needs_env: bool = True) -> Request:
    """The config and options of ``lockstep train ARGV``; without an environment if that is not needed.

    Raises:
        ValueError: one line that names the key, the value and what would work.
    """
    arguments = parse_arguments(argv)
    if len(arguments.positional) > 1:
        raise ValueError(f"{arguments.positional[1]!r}: one config file or environment id is enough")
    target = arguments.positional[0] if arguments.positional else None
    file_settings, source = base_settings(target)
    if isinstance(file_settings.get("env"), str):
        file_settings["env"] = {"id": file_settings["env"]}
    options_given = {k: v for k, v in arguments.settings.items() if k in RunOptions.model_fields}
    config_given = {k: v for k, v in arguments.settings.items() if k in Config.model_fields}
    options_in_file = {k: file_settings.pop(k) for k in list(file_settings) if k in RunOptions.model_fields}
    try:
        _no_booleans(file_settings | options_in_file)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    validate(RunOptions, options_in_file, source)
    options = validate(RunOptions, options_in_file | options_given, "command line")
    if needs_env and target is None and options.resume is None and _env_id(config_given) is None:
        raise ValueError("a config file or an environment id is needed, e.g. lockstep train CartPole-v1")
    env_id = _env_id(file_settings, config_given)
    base, note = preset_for(env_id) if isinstance(env_id, str) else {}, None
    if isinstance(env_id, str) and not has_preset(env_id) and options.resume is None:
        from lockstep.launch.defaults import defaults_by_spaces  # makes the environment: only where it is needed

        given = merge(json.loads(json.dumps(file_settings)), config_given)
        defaults, note = defaults_by_spaces(env_id, given, options)
        base = merge(defaults, base)
    elif isinstance(env_id, str) and config_given.get("algorithm", file_settings.get("algorithm")) == "grpo":
        base = for_grpo(env_id, base)
    validate(Config, _layer(json.loads(json.dumps(base)), file_settings), source)
    settings = _layer(_layer(base, file_settings), config_given)
    config, line = _stepped_inside(validate(Config, settings, "command line"))
    lines = [text for text in (note, line) if text is not None]
    return Request(config, options, merge(dict(file_settings), config_given), "\n".join(lines) or None)


def _stepped_inside(config: Config) -> tuple[Config, str | None]:
    if config.engine != "jax":
        return config, None
    from lockstep.envs.batched.twins import stepped_inside  # imports Gymnasium: only where it is needed

    return stepped_inside(config)
