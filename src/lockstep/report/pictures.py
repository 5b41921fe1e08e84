"""Draws charts and histograms by matplotlib as SVG, in the page's colours, which adapt to dark mode and paper."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lockstep.policies.results import edges_of
from lockstep.report.charts import Chart
from lockstep.runs.plot import X_LABELS
from lockstep.runs.shown.labels import STYLES

COLORS = 8
"""How many colours the page has for runs; lines of more runs are dashed."""
INK, GRID, BAR = "#010203", "#020304", "#030405"
"""Placeholders that are replaced by colours of the page's style sheet, as those of runs are."""
LARGE, SMALL = (6.6, 2.9), (3.5, 2.2)
SIDE = 0.02
"""Share of a chart's width that is free on either side of its lines."""
LOOK: Any = {
    "svg.fonttype": "none",
    "text.usetex": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


def chart_svg(chart: Chart, name: str, extent: tuple[float, float]) -> Markup:
    """Draws a chart over steps or iterations as an ``svg`` element.

    Args:
        chart: the chart to draw.
        name: prefix of the element's ids, unique on the page.
        extent: first and last value of the horizontal axis.
    """

    def draw(axis: Any) -> None:
        _lines(axis, chart)
        room = SIDE * (extent[1] - extent[0]) or 1.0
        axis.set_xlim(extent[0] - room, extent[1] + room)

    return _drawn(LARGE if chart.is_large else SMALL, name, chart.in_words(), draw)


def histogram_svg(values: np.ndarray, words: str, name: str) -> Markup:
    """Draws a histogram of returns as an ``svg`` element; ``words`` describe it, ``name`` is the prefix of its ids."""

    def draw(axis: Any) -> None:
        axis.hist(values, edges_of(values), color=BAR)
        axis.axvline(values.mean(), color=INK, linewidth=1.2, linestyle="--")
        axis.set_xlabel("return")
        axis.set_ylabel("episodes")

    return _drawn(SMALL, name, words, draw)


def _lines(axis: Any, chart: Chart) -> None:
    for series in chart.series:
        x, color = series.x[chart.over], _stand_in(series.color)
        for seed in series.seeds:
            axis.plot(x, seed, color=color, linewidth=0.6, alpha=0.35)
        if series.band is not None:
            axis.fill_between(x, *series.band, color=color, alpha=0.18, linewidth=0)
        look: Any = {"linewidth": 1.6, "linestyle": STYLES[series.color // COLORS % len(STYLES)]}
        axis.plot(x, series.y, color=color, marker="o" if len(x) == 1 else "", markersize=4, **look)
    axis.set_xlabel(X_LABELS[chart.over])


def _stand_in(color: int) -> str:
    return f"#0405{16 + color % COLORS:02x}"


def _drawn(size: tuple[float, float], name: str, words: str, draw: Any) -> Markup:
    text = io.StringIO()
    with rc_context({**LOOK, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_visible(False)
        axis = figure.subplots()
        axis.patch.set_visible(False)
        draw(axis)
        axis.grid(linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(5 if size is SMALL else 8))
        axis.xaxis.set_major_formatter(EngFormatter(sep="", usetex=False))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _in_the_pages_style(text.getvalue(), name, words)


def _in_the_pages_style(svg: str, name: str, words: str) -> Markup:
    """Turns matplotlib's SVG into an element of the page, with unique ids, the page's look, and a description."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    colors = {INK: "var(--ink-soft)", GRID: "var(--line)", BAR: "var(--c0)"}
    colors |= {_stand_in(color): f"var(--c{color})" for color in range(COLORS)}
    for stand_in, color in colors.items():
        svg = svg.replace(stand_in, color)
    attributes = f'<svg role="img" aria-label="{escape(words)}" preserveAspectRatio="xMinYMin meet"'
    width = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    assert width is not None, "matplotlib writes a viewBox"
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'{attributes} style="max-width: {1.3 * float(width[1]):.0f}px"', 1)
    return Markup(re.sub(r"\s*\n\s*", "\n", svg))
