"""Writes what ``lockstep train --help`` and ``--help-all`` print."""

from __future__ import annotations

import functools
import re
import shutil
import textwrap
from typing import Any

from lockstep.config.keys import LEAVES, Leaf
from lockstep.config.run import Config, RunOptions

USAGE = """\
usage: lockstep train CONFIG_FILE_OR_ENV_ID [OPTIONS] [key=value ...]

Train an agent.

CONFIG_FILE_OR_ENV_ID is a YAML, JSON or TOML file, a run directory, or an environment id whose preset is the start. \
Options of Stable-Baselines3, CleanRL and rsl_rl are taken where they mean the same (--n-envs, --lr, --ent-coef, \
--batch-size, --update-epochs, --track, …); of the others one line says what to write."""

MEANS = """\
  -h, --help
        show the most common options
  --help-all
        show all options
  --print-config, --print-environment
        print the config as YAML, or the variables that ranks would get, and end"""

PAGE = 120  # columns of prose, at most

COMMON = (
    *("env.workers", "engine", "device", "seed", "seeds", "total_steps", "num_envs", "num_steps", "reduction"),
    *("nproc", "name", "resume", "ppo.learning_rate", "ppo.num_epochs", "ppo.num_minibatches", "ppo.entropy_coef"),
    *("network.hidden_sizes", "network.recurrent", "normalize.observations", "eval.interval", "log.wandb"),
)
"""Settings that ``--help`` lists."""


def train_help(config: Config, options: RunOptions, everything: bool = False) -> str:
    """Lists options of ``lockstep train`` with their types, meanings, and the given values as defaults.

    It lists the common ones, or ``everything`` by section.
    """
    width = shutil.get_terminal_size().columns
    lines = [*(line for text in USAGE.split("\n") for line in _wrapped(text, width)), "", MEANS, ""]
    if not everything:
        lines += ["options:", *(line for path in COMMON for line in _entry(LEAVES[path], config, options, width))]
        return "\n".join([*lines, "", "lockstep train --help-all lists all options."])
    for name, leaves in by_section().items():
        lines += textwrap.wrap(f"{name} options: {leaves[0].about}" if name else "options:", width)
        lines += [line for leaf in leaves for line in _entry(leaf, config, options, width)]
        lines.append("")
    return "\n".join(lines[:-1])


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, min(width, PAGE), break_on_hyphens=False) or [""]


def by_section() -> dict[str, list[Leaf]]:
    """Groups all settings by their section; those without one come first."""
    sections: dict[str, list[Leaf]] = {"": []}
    for leaf in LEAVES.values():
        sections.setdefault(leaf.path.rpartition(".")[0], []).append(leaf)
    return sections


def _entry(leaf: Leaf, config: Config, options: RunOptions, width: int) -> list[str]:
    meaning = meaning_of(leaf, config, options)
    indented = textwrap.wrap(meaning, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return [f"  {_spellings(leaf)}", *indented]


def meaning_of(leaf: Leaf, config: Config, options: RunOptions) -> str:
    """Returns what a setting means, with its default among the given values."""
    owner: Any = options if leaf.path in RunOptions.model_fields else config
    value = functools.reduce(getattr, leaf.path.split("."), owner)
    if value is None and re.search(r"\bdefault\b", leaf.description):  # the description says what None means
        return leaf.description
    return f"{leaf.description} (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def _spellings(leaf: Leaf) -> str:
    """Returns an option as it is written on the command line, with its type."""
    flag = "--" + leaf.path.replace("_", "-")
    group, _, last = flag.rpartition(".")
    negated = f"{group}.no-{last}" if group else f"--no-{flag[2:]}"
    return f"{flag}, {negated}" if leaf.kind == "flag" else f"{flag} {leaf.type}"
