"""Files that are this user's alone: what others may write is neither read nor executed."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def only_we_write(path: Path) -> bool:
    """Says whether a file or directory is this user's and nobody else may write it; a missing one is nobody's."""
    with contextlib.suppress(OSError):
        found = path.stat(follow_symlinks=False)
        return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & OTHERS_WRITE)
    return False


def make_private(directory: Path) -> bool:
    """Makes a directory, and those above it that are missing, for this user alone; says whether it is so.

    Raises:
        OSError: it can't be made.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return only_we_write(directory)
