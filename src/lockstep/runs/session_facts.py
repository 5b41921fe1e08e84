"""Keeps how a session of a run was started; asks git for the commit."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DESCRIBE = ("-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
PATIENCE = 5.0
"""Seconds that git may take; after that, as on a slow disk, the commit stays unknown."""


@dataclass(frozen=True)
class SessionFacts:
    """What a launcher tells each rank about the session.

    Attributes:
        restarts: the launcher's restarts so far, a row each.
        audience: address of the socket at which another process listens to the run's records; None if none does.
        started: when the launcher began, ISO 8601 in UTC; None if there was no launcher, as the next two.
        command: the words of its command line; None also if it had none.
        commit: of the git repository in which it was started; None also if it was in none.
        commands: for each seed of a group that is one program, the command line that trains it alone.
    """

    restarts: tuple[dict[str, Any], ...] = ()
    audience: str | None = None
    started: str | None = None
    command: tuple[str, ...] | None = None
    commit: str | None = None
    commands: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def of_seed(self, seed: int) -> SessionFacts:
        """Returns what the run of one of a group's seeds keeps: the group's start and commit, its own command."""
        return SessionFacts(started=self.started, command=self.commands.get(seed), commit=self.commit)


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
