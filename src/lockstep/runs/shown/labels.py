"""Writes names into matplotlib's pictures: as text, in lines that fit, and in a legend that leaves the axes room."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

LONGEST = 70
"""Letters of a name that stand in one line."""
SHORT = 24
"""Letters of a name beside an axis."""
INSIDE = 10
"""Lines of a legend that fit over the curves."""
STYLES = ("-", "--", ":", "-.")
"""Of lines; the next one begins when matplotlib's ten colours begin again."""
MINUS = "\N{MINUS SIGN}"
COLORS, LETTER, HANDLE, LINE = 10, 0.075, 0.5, 0.18
"""Number of matplotlib's colours; in inches the width of a letter, of a sign in a legend, the height of its lines."""
MOST, ROOM = 6, 40
"""Numbers along an axis of half a picture, and letters."""


def in_a_picture(name: str, longest: int = LONGEST) -> str:
    """Returns a name for matplotlib, which takes ``$…$`` for a formula, and leaves ``_name`` out of a legend."""
    lines = textwrap.wrap(name, longest, break_on_hyphens=False) if len(name) > longest else [name]
    return (" " if name.startswith("_") else "") + "\n".join(lines).replace("$", r"\$")


def style_of(place: int) -> str:
    """Returns the style of the line at a place, which with its colour tells it from others."""
    return STYLES[place // COLORS % len(STYLES)]


def shortened(name: str, longest: int = SHORT) -> str:
    """Returns a name for an axis: without its middle if it is long."""
    half = longest // 2
    return in_a_picture(name if len(name) <= longest else f"{name[:half]}…{name[-half:]}")


def add_legend(figure: Any, names: Sequence[str], title: str | None = None) -> None:
    """Adds the legend of what a figure's first axes have, as ``names``: inside of them, or below all if it is long."""
    look: Any = {"frameon": False, "fontsize": 8, "title": title, "title_fontsize": 8, "alignment": "left"}
    lines = [name.split("\n") for name in names]
    width, height = figure.get_size_inches()
    inside = width / figure.axes[0].get_subplotspec().get_gridspec().ncols / 2
    letters = max(len(line) for each in lines for line in each)
    if sum(map(len, lines)) <= INSIDE and HANDLE + LETTER * letters < inside:
        figure.axes[0].legend(**look)
        return
    columns = max(1, min(len(names), int((width - HANDLE) / (HANDLE + LETTER * letters))))
    rows = math.ceil(len(names) / columns) * max(map(len, lines)) + (title is not None)
    figure.set_size_inches(width, height + LINE * rows)
    figure.legend(loc="outside lower left", ncols=columns, **look)


def write_out(axis: Any, integer: bool = False) -> None:
    """Makes an axis write its numbers out, as many as there is room for, without an offset that stands aside."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def said(value: float, place: int | None) -> str:
        first, end = axis.get_view_interval()
        spread, size = abs(end - first), max(abs(first), abs(end))
        if abs(value) < 1e-9 * spread:
            return "0"
        digits = 12 if spread > 1e-10 * size else 17  # as many as tell it from its neighbours
        return f"{value:.{digits}g}".replace("-", MINUS)

    first, end = axis.get_view_interval()
    for most in range(MOST, 1, -1):
        locator = MaxNLocator(most, integer=integer)
        labels = [said(value, None) for value in locator.tick_values(first, end) if first <= value <= end]
        if len("  ".join(labels)) <= ROOM:
            break
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(said))
