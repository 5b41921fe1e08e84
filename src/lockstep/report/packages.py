"""Says what the page needs, before anything is trained: packages that write it, and a suffix of its name."""

from __future__ import annotations

import importlib.util

NEEDED = ("jinja2", "matplotlib")
SUFFIXES = (".html", ".htm")


def check_installed() -> None:
    """Raises a one-line ``ValueError`` if a package that draws or writes the page isn't installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"report: needs {' and '.join(missing)}; pip install 'lockstep-rl[report]'")
