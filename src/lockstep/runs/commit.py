"""Asks git of which commit a directory is, for what a run remembers of its beginning."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

DESCRIBE = ("-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
PATIENCE = 5.0
"""Seconds that git may take: of a repository on a slow disk the commit stays unknown."""


def commit_of(directory: Path) -> str | None:
    """The commit that is checked out, with ``-dirty`` behind it where tracked files differ; None: git knows none."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *DESCRIBE], cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
