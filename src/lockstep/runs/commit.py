"""Asks git which commit a directory is at, for a run to record at its start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

DESCRIBE = ("-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
PATIENCE = 5.0
"""Seconds that git may take; after that, as on a slow disk, the commit stays unknown."""


def commit_of(directory: Path) -> str | None:
    """Returns the checked-out commit, with ``-dirty`` appended if tracked files differ; None if git knows none."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *DESCRIBE], cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
