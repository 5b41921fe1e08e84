"""Files that are this user's alone: what others may write is neither read nor executed."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

PRIVATE_HINT = "remove it, or chmod -R go-w ~/.cache/lockstep"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def only_we_write(path: Path) -> bool:
    """Says whether a file or directory is this user's and nobody else may write it; a missing one is nobody's."""
    with contextlib.suppress(OSError):
        found = path.stat(follow_symlinks=False)
        return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & OTHERS_WRITE)
    return False


def make_cache(directory: Path, top: Path) -> Path | None:
    """Makes a directory, and those between it and ``top``, for this user alone; None if others may write in any.

    Raises:
        OSError: it can't be made.
    """
    within = [directory, *(parent for parent in directory.parents if parent.is_relative_to(top))]
    for each in reversed(within):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_we_write(each.resolve()):  # it may be our link to another disk
            return None
    return directory


def home_place(variable: str, name: str) -> Path | None:
    """Names a directory of this user's: where a variable says, else so called at home; None if nobody knows a home.

    So it is in a container for the id of a user that it doesn't list: ``~`` would be in the working directory then,
    which may be a stranger's.
    """
    given, home = os.environ.get(variable), os.path.expanduser("~")
    if given:
        return Path(given)
    return Path(home, name) if home != "~" else None


def user_cache(name: str) -> tuple[Path, bool]:
    """Makes a directory in the user's cache; returns it, and whether it can be used: others may write there, or nobody.

    ``name`` may have several parts.
    """
    base = home_place("XDG_CACHE_HOME", ".cache")
    if base is None:
        return Path("lockstep", name), False
    directory = base / "lockstep" / name
    try:
        made = make_cache(directory, base / "lockstep")
    except OSError:
        return directory, False  # no place to keep it; everything else works
    if made is None:
        warnings.warn(f"{directory} isn't used, for others may write there: {PRIVATE_HINT}", stacklevel=3)
    return directory, made is not None


def make_private(directory: Path) -> bool:
    """Makes a directory, and those above it that are missing, for this user alone; says whether it is so.

    Raises:
        OSError: it can't be made.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return only_we_write(directory)
