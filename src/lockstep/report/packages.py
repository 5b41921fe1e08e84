"""Finds out whether what writes the page is installed, before anything is trained for it."""

from __future__ import annotations

import importlib.util

NEEDED = ("jinja2", "matplotlib")


def check_installed() -> None:
    """Raise a one-line ``ValueError`` where a package that draws or writes the page isn't installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"report: needs {' and '.join(missing)}; pip install 'lockstep-rl[report]'")
