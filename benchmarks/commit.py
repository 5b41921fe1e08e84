"""Says of which code a figure is."""

from __future__ import annotations

from pathlib import Path

from lockstep.runs.session_facts import commit_of

ROOT = Path(__file__).parents[1]


def short_commit(tree: Path = ROOT) -> str:
    """The commit of a checkout, short, with ``-dirty`` behind it where tracked files differ; or ``unknown``."""
    commit, dash, dirty = (commit_of(tree) or "unknown").partition("-")
    return commit[:12] + dash + dirty
