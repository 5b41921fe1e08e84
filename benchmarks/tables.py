"""Markdown of the benchmark's reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def times_text(value: float | None) -> str:
    """A ratio as text."""
    return "" if value is None else f"{value:.2f} ×"
