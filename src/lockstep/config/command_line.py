"""The command line of ``lockstep train``: what it says, with presets and config files below it, and its ``--help``.

Later sources override earlier ones: defaults, the preset of the environment, the file, the command line. Reading them
makes no environment; what depends on one is added by :mod:`lockstep.launch.defaults`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.files import FILE_SUFFIXES, merge, nest, read_file
from lockstep.config.keys import ALIASES, FREE, LEAVES, Leaf, validate
from lockstep.config.presets import for_grpo, preset_for
from lockstep.config.run import AUTO, Config, RunOptions

SWITCHES = {"--amp": ("precision", "bf16"), "--no-amp": ("precision", "fp32")}
"""Options without a value that stand for a value of another."""

USAGE = """\
usage: lockstep train CONFIG_FILE_OR_ENV_ID [OPTIONS]

Train an agent.

CONFIG_FILE_OR_ENV_ID is a YAML, JSON or TOML file, a run directory, or an environment id whose preset is the start.
--env.kwargs '{"g": 9.8}' gives the environment arguments, as JSON; --network.custom-kwargs the custom network's.
--amp is --precision bf16.
Aliases: --total-timesteps, --n-envs, --n-steps, --n-epochs, --learning-rate, --lr, --gamma, --gae-lambda, --ent-coef,
--target-kl, --max-grad-norm, --log-jsonl, --env-id, --world-size.

  -h, --help
        show this help message and exit"""


def _leaf_of(flag: str) -> tuple[Leaf, bool]:
    """Finds the setting that ``--flag`` names, and whether it is negated (``--no-quiet``, ``--log.no-tensorboard``)."""
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


def parse_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Splits a command line into positional words and nested settings, which the config itself checks later.

    An unknown option, or one without its value, is a one-line ``ValueError`` with the nearest option.
    """
    positional: list[str] = []
    settings: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            positional.append(word)
            continue
        if word.partition("=")[0] in SWITCHES:
            if "=" in word:
                raise ValueError(f"{word}: takes no value; {word.partition('=')[0]} alone says it")
            settings |= dict([SWITCHES[word]])
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
        merge(settings, nest(leaf.path.split("."), value))
    return positional, settings


# --- together ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Holds what the user asked for, before anybody has looked at the environment.

    Beside the config of all sources stand the nested settings of each: the environment's preset, the file (a config, a
    run directory, or just the environment id), and what was given on the command line; and the run directory that those
    of the file are from, if they are from one.
    """

    config: Config
    options: RunOptions
    preset: dict[str, Any]
    file: dict[str, Any]
    given: dict[str, Any]
    run: Path | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings that were given explicitly."""
        return merge(copy.deepcopy(self.file), self.given)

    def config_over(self, defaults: Mapping[str, Any]) -> Config:
        """Reads the config again, with these settings below all others."""
        return validate(Config, layered(defaults, self.preset, self.file, self.given), "command line")


def base_settings(target: str | None) -> tuple[dict[str, Any], str | None]:
    """Reads the settings of a config file, a run directory or an environment id.

    Returns:
        Nested settings, and the file that they stand in, if they do.
    """
    if target is None:
        return {}, None
    path = Path(target)
    if path.suffix in FILE_SUFFIXES:
        return read_file(path), target
    if path.is_dir() and (path / "config.json").is_file():
        return read_file(path / "config.json"), str(path / "config.json")
    if path.is_dir() and path.parent.name == "checkpoints":
        raise ValueError(f"{target} is a checkpoint; --resume {target} continues from it")
    return {"env": {"id": target}}, None


def _no_booleans(values: Any, path: str = "") -> None:
    """Refuses a YAML ``true`` where a number is wanted: it would quietly be 1."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        inner = f"{path}{key}"
        if isinstance(value, bool) and inner in LEAVES and LEAVES[inner].kind != "flag":
            raise ValueError(f"{inner}: {value}: a number or text is wanted here, not true or false")
        if inner not in FREE:
            _no_booleans(value, f"{inner}.")


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Lays nested settings over one another, the last on top; ``num_envs`` and ``num_envs_per_rank`` take turns."""
    out: dict[str, Any] = {}
    for layer in layers:
        for number, other in (("num_envs_per_rank", "num_envs"), ("num_envs", "num_envs_per_rank")):
            if layer.get(number) is not None and other not in layer:
                out.pop(other, None)
        merge(out, copy.deepcopy(layer))
    return out


def _validated(model: Any, below: dict[str, Any], given: dict[str, Any], file: str | None) -> Any:
    """Validates what a file says, if there is one, and what the command line makes of it, if that says anything."""
    found = None if file is None else validate(model, below, file)
    return found if found is not None and not given else validate(model, layered(below, given), "command line")


def _env_id(*layers: Mapping[str, Any]) -> str | None:
    found = None
    for layer in layers:
        env = layer.get("env")
        found = (env.get("id") if isinstance(env, Mapping) else env) or found
    return found


def read_request(argv: Sequence[str], needs_env: bool = True) -> Request:
    """Reads the config and options of ``lockstep train ARGV``; without an environment if that is not needed.

    What is wrong is a one-line ``ValueError`` that names the key, the value and what would work.
    """
    positional, from_words = parse_arguments(argv)
    if len(positional) > 1:
        raise ValueError(f"{positional[1]!r}: one config file or environment id is enough")
    settings, file = base_settings(positional[0] if positional else None)
    if isinstance(settings.get("env"), str):
        settings["env"] = {"id": settings["env"]}
    try:
        _no_booleans(settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    options_in_file = {k: settings.pop(k) for k in list(settings) if k in RunOptions.model_fields}
    run = Path(file).parent if file is not None and file != positional[0] else None
    for key in options_in_file if run is not None else ():
        raise ValueError(f"{key}: {file} is the config of a run, which doesn't say how and where another is run")
    options_given = {k: v for k, v in from_words.items() if k in RunOptions.model_fields}
    given = {k: v for k, v in from_words.items() if k in Config.model_fields}
    options = _validated(RunOptions, options_in_file, options_given, file if options_in_file else None)
    env_id = _env_id(settings, given)
    if needs_env and not positional and options.resume in (None, AUTO) and env_id is None:
        raise ValueError("a config file or an environment id is needed, e.g. lockstep train CartPole-v1")
    preset = preset_for(env_id) if isinstance(env_id, str) else {}
    if isinstance(env_id, str) and given.get("algorithm", settings.get("algorithm")) == "grpo":
        preset = for_grpo(env_id, preset)
    config = _validated(Config, layered(preset, settings), given, file)
    return Request(config, options, preset, settings, given, run)


# --- help -------------------------------------------------------------------------------------------------------


def train_help(config: Config, options: RunOptions) -> str:
    """Lists every option of ``lockstep train`` by section, with its type, its meaning and these values as defaults."""
    sections: dict[str, list[Leaf]] = {"": []}
    for leaf in LEAVES.values():
        sections.setdefault(leaf.path.rpartition(".")[0], []).append(leaf)
    width, lines = shutil.get_terminal_size().columns, [USAGE]
    for name, leaves in sections.items():
        lines += ["", *textwrap.wrap(f"{name} options: {leaves[0].about}" if name else "options:", width)]
        for leaf in leaves:
            owner = options if leaf.path in RunOptions.model_fields else config
            value = functools.reduce(getattr, leaf.path.split("."), owner)
            spelled = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            meaning = f"{leaf.description} (default: {spelled})"
            lines += [
                f"  {_spellings(leaf)}",
                *textwrap.wrap(meaning, width, initial_indent=" " * 8, subsequent_indent=" " * 8),
            ]
    return "\n".join(lines)


def _spellings(leaf: Leaf) -> str:
    """Writes an option as the command line takes it, with its type."""
    flag = "--" + leaf.path.replace("_", "-")
    group, _, last = flag.rpartition(".")
    negated = f"{group}.no-{last}" if group else f"--no-{flag[2:]}"
    return f"{flag}, {negated}" if leaf.kind == "flag" else f"{flag} {leaf.type}"
