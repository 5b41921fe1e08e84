"""Checks that the packages which write the page are installed, before anything is trained."""

from __future__ import annotations

import importlib.util

NEEDED = ("jinja2", "matplotlib")


def check_installed() -> None:
    """Raises a one-line ``ValueError`` if a package that draws or writes the page isn't installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"report: needs {' and '.join(missing)}; pip install 'lockstep-rl[report]'")
