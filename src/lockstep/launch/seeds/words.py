"""Derives the command line that trains one seed of a group alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.command_line import base_settings, parts_of
from lockstep.config.run import AUTO, RunOptions
from lockstep.runs.directory import SEED

OF_THE_GROUP = ("seeds", "num_seeds", "seeds_at_once", "seed", "name")
"""Settings that the command line of one seed leaves out or replaces."""
NONE = {"seeds": "none", "num_seeds": "1", "seeds_at_once": "none", "name": "none", "resume": "none"}
"""Values that undo what a config file may say of the group."""


def words_of_seed(command: Sequence[str], options: RunOptions, run: Path) -> list[str]:
    """Returns the words that train one run of a group alone; it resumes if the group did, else it begins.

    Args:
        command: the words after ``lockstep`` that asked for the group.
        options: from these words, and a config file that they name.
        run: its directory, inside the group's.
    """
    words, said, resumes = [*command[:1]], None, False
    for part in parts_of(command[1:]):
        if not part.path and isinstance(part.value, str):
            settings, file = base_settings(part.value)
            said = said if file is None else settings
        if part.path == "resume" and part.value not in (AUTO, None):
            resumes = True
            words += ["--resume", f"{str(part.value).rstrip('/')}/{run.name}"]
        elif part.path not in (*OF_THE_GROUP, "resume"):
            words += part.words
    if resumes:
        return words
    if said is not None:
        for name, none in NONE.items():
            if said.get(name) is not None or getattr(options, name) != RunOptions.model_fields[name].default:
                words += [f"--{name.replace('_', '-')}", none]
    return [*words, "--seed", run.name.removeprefix(SEED)]
