"""Checks and makes files that only this user may write; anything else is neither read nor executed."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

PRIVATE_HINT = "remove it, or chmod -R go-w ~/.cache/lockstep"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def only_we_write(path: Path) -> bool:
    """Says whether this user owns a file or directory and nobody else may write it; False if it is missing."""
    with contextlib.suppress(OSError):
        found = path.stat(follow_symlinks=False)
        return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & OTHERS_WRITE)
    return False


def make_cache(directory: Path, top: Path) -> Path | None:
    """Makes a directory, and those from ``top`` on that hold it, for this user alone; None if others may write in any.

    Raises:
        OSError: it can't be made.
    """
    within = [directory, *(parent for parent in directory.parents if parent.is_relative_to(top))]
    for each in reversed(within):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_we_write(each.resolve()):  # resolved, because it may be our own link to another disk
            return None
    return directory


def home_place(variable: str, name: str) -> Path | None:
    """Returns the directory that an environment variable names, else ``name`` in the home directory; None if unknown.

    Only absolute paths count: any other is a name in the working directory, which may belong to someone else. A
    container that runs with a user id which it doesn't list has no home, ``~``; that of an empty ``HOME`` would be the
    root directory.
    """
    given, home = os.environ.get(variable, ""), os.path.expanduser("~")
    if os.path.isabs(given):  # the XDG specification ignores others, too
        return Path(given)
    return Path(home, name) if os.path.isabs(home) and os.environ.get("HOME") != "" else None


def user_cache(name: str) -> tuple[Path, bool]:
    """Makes a directory in the user's cache and returns it with whether it can be used.

    It can't if it can't be made, or if others may write there. ``name`` may have several parts.
    """
    base = home_place("XDG_CACHE_HOME", ".cache")
    if base is None:
        return Path("lockstep", name), False
    directory = base / "lockstep" / name
    try:
        made = make_cache(directory, base / "lockstep")
    except OSError:
        return directory, False  # works without a cache
    if made is None:
        warnings.warn(f"{directory} isn't used, for others may write there: {PRIVATE_HINT}", stacklevel=3)
    return directory, made is not None


def make_private(directory: Path) -> bool:
    """Makes a directory and its missing parents for this user alone; returns whether nobody else may write it.

    Raises:
        OSError: it can't be made.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return only_we_write(directory)
