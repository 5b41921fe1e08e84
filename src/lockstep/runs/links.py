"""Finds links in a run's directory before anything is written through them."""

from __future__ import annotations

import os
from pathlib import Path

WANDB = "wandb"
SEED = "seed_"  # followed by the seed, the name of one run's directory in a group


def link_in_words(path: Path) -> str:
    """Says that a run's file is a link, where it leads, and what makes the run readable."""
    target = os.readlink(path)
    helps = "copy the run with cp -rL" if path.exists() else "nothing is there: fetch the run's files first"
    return f"{path} is a link to {target}; {helps}"


def odd_entry(path: Path) -> str | None:
    """Describes an entry of a run's directory that is a link, or neither file nor directory; None if there is none."""
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        is_runs = here == path or (here.parent == path and here.name.startswith(SEED))
        if is_runs and WANDB in folders and not (here / WANDB).is_symlink():
            folders.remove(WANDB)  # only W&B's software writes here, and it makes links
        for name in sorted([*folders, *files]):
            entry = Path(folder, name)
            if entry.is_symlink():
                return f"{entry.relative_to(path)} is a link to {os.path.realpath(entry)}, which would be written"
            if not (entry.is_file() or entry.is_dir()):
                return f"{entry.relative_to(path)} is neither a file nor a directory"
    return None
