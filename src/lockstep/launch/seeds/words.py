"""The words of a command line that train one seed of a group by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.command_line import parts_of
from lockstep.config.run import AUTO, RunOptions
from lockstep.runs.directory import SEED

OF_THE_GROUP = ("seeds", "num_seeds", "seeds_at_once", "seed", "name")
"""Settings that a command of one seed has none of, or others."""
NONE = {"seeds": "none", "num_seeds": "1", "name": "none"}
"""What leaves one out that a config file gives."""


def words_of_seed(command: Sequence[str], options: RunOptions, run: Path) -> list[str]:
    """Returns the words that train a group's ``run`` by itself: it goes on where the group did, else it begins.

    Args:
        command: the words after ``lockstep`` that asked for the group.
        options: that they, and a config file that they name, gave.
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
