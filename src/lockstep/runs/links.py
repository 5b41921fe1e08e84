"""Finds what in a run's directory leads elsewhere, before anything is written there."""

from __future__ import annotations

import os
from pathlib import Path

WANDB = "wandb"


def link_in_words(path: Path) -> str:
    """Says of a link where a file of a run should be where it leads, and how the run can be read."""
    target = os.readlink(path)
    helps = "copy the run with cp -rL" if path.exists() else "nothing is there: fetch the run's files first"
    return f"{path} is a link to {target}; {helps}"


def odd_entry(path: Path) -> str | None:
    """Finds something in a run's directory through which others' files would be written, or which is no file at all."""
    for folder, folders, files in os.walk(path):
        if Path(folder) == path and WANDB in folders and not (path / WANDB).is_symlink():
            folders.remove(WANDB)  # has links of its own, and is written by its own software
        for name in sorted([*folders, *files]):
            entry = Path(folder, name)
            if entry.is_symlink():
                return f"{entry.relative_to(path)} is a link to {os.path.realpath(entry)}, which would be written"
            if not (entry.is_file() or entry.is_dir()):
                return f"{entry.relative_to(path)} is neither a file nor a directory"
    return None
