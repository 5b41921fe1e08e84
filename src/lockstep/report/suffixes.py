"""Checks the name of the file that a page is written to."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".html", ".htm")


def check_suffix(page: Path) -> None:
    """Raises a one-line ``ValueError`` unless a page's name ends in one of :data:`SUFFIXES`."""
    if page.suffix not in SUFFIXES:
        raise ValueError(f"out: {page} must end in {' or '.join(SUFFIXES)}")
