"""Derives the command line that trains one seed of a group alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.command_line import parts_of
from lockstep.config.run import AUTO, RunOptions
from lockstep.runs.directory import SEED

OF_THE_GROUP = ("seeds", "num_seeds", "seeds_at_once", "seed", "name")
"""Settings that the command line of one seed leaves out or replaces."""
NONE = {"seeds": "none", "num_seeds": "1", "name": "none"}
"""Values that undo such a setting if a config file gives it."""


def words_of_seed(command: Sequence[str], options: RunOptions, run: Path) -> list[str]:
    """Returns the words that train one run of a group alone; it resumes if the group did, else it begins.

    Args:
        command: the words after ``lockstep`` that asked for the group.
        options: from these words, and a config file that they name.
        run: its directory, inside the group's.
    """
    words, given, resumes = [*command[:1]], set[str](), False
    for part in parts_of(command[1:]):
        given.add(part.path)
        if part.path == "resume" and part.value not in (AUTO, None):
            resumes = True
            words += ["--resume", f"{str(part.value).rstrip('/')}/{run.name}"]
        elif part.path not in (*OF_THE_GROUP, "resume"):
            words += part.words
    for name, none in NONE.items():
        if name not in given and getattr(options, name) != RunOptions.model_fields[name].default:
            words += [f"--{name.replace('_', '-')}", none]
    return words if resumes else [*words, "--seed", run.name.removeprefix(SEED)]
