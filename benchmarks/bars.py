"""Draws what ``peers.json`` holds as bars, ours beside the peers': ``python -m benchmarks.bars [FOLDER]``.

``make bench`` draws it too. The picture names the digest of the figures that it was drawn from.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import ONE_THREAD
from benchmarks.learning import digest
from benchmarks.programs import ENVPOOL

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS, TITLE_WIDTH = 3, 46
OURS, PEERS = "#1f6fb4", "#b9bec5"


@dataclass(frozen=True)
class Bar:
    """A program's median steps/s, and the least and the most."""

    label: str
    ours: bool
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Panel:
    """The programs of a case that have a figure, the fastest at the top."""

    title: str
    bars: tuple[Bar, ...]


def panels(found: dict[str, Any]) -> list[Panel]:
    """A panel a case, in the order of the file; rows that failed have no bar, and the scaling has no panel.

    On both cores the fastest peer with one thread is there, too, if none of the case's own is as fast.
    """
    rows = [row for row in found["rows"] if row["scaling"] is None and row["median"] is not None]
    titles = found.get("titles", {})
    out = []
    for case in dict.fromkeys(row["case"] for row in rows):
        bars = [_bar(row) for row in [*(row for row in rows if row["case"] == case), *_ahead(rows, case)]]
        title = titles.get(case, f"{case}: {next(row['env'] for row in rows if row['case'] == case)}")
        out.append(Panel(title, tuple(sorted(bars, key=lambda bar: bar.median))))
    return out


def _ahead(rows: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """The fastest peer with one thread of a case on both cores, if it is faster than the case's own; or none."""
    cases = (case, ONE_THREAD.get(case))
    peers = [row for row in rows if not row["ours"] and row["case"] in cases]
    fastest = max(peers, key=lambda row: row["median"], default=None)
    if fastest is None or fastest["case"] == case:
        return []
    return [fastest | {"label": f"{fastest['label']} ({fastest['case']})"}]


def _bar(row: dict[str, Any]) -> Bar:
    label = row["label"]
    if row["ours"] and not row["env"].endswith(ENVPOOL):  # whose label says it
        label += " (arrays)" if row["env"].startswith("lockstep/") else " (Gymnasium)"
    return Bar(label, row["ours"], row["median"], min(row["rates"]), max(row["rates"]))


def figure_of(found: dict[str, Any]) -> Any:
    """Makes matplotlib's figure of what a ``peers.json`` holds; the length of a bar is a median."""
    from matplotlib.figure import Figure

    shown = panels(found)
    rows = [shown[i : i + COLUMNS] for i in range(0, len(shown), COLUMNS)]
    heights = [1.2 + 0.27 * max(len(panel.bars) for panel in row) for row in rows]
    figure = Figure(figsize=(6.2 * COLUMNS, sum(heights) + 0.6 if heights else 1.0), layout="constrained")
    if rows:
        axes = figure.subplots(len(rows), COLUMNS, squeeze=False, gridspec_kw={"height_ratios": heights})
        for i, row in enumerate(rows):
            for j in range(COLUMNS):
                if j < len(row):
                    _panel(axes[i][j], row[j])
                else:
                    axes[i][j].set_axis_off()
    figure.supxlabel(_said(found["facts"]), fontsize=8, color="0.4")
    return figure


def _said(facts: dict[str, str]) -> str:
    return f"environment steps/s, {facts.get('date', '')}, {facts.get('machine', '')}; {facts.get('how', '')}"


def draw(text: str, out: Path) -> None:
    """Writes the picture of the text of a ``peers.json``."""
    found = json.loads(text)
    metadata = {"Figures": digest(text), "Description": _said(found["facts"])}
    figure_of(found).savefig(out, dpi=90, metadata=metadata)


def _panel(axes: Any, panel: Panel) -> None:
    """One case."""
    medians = [bar.median for bar in panel.bars]
    spread = [[b.median - b.least for b in panel.bars], [b.most - b.median for b in panel.bars]]
    colors = [OURS if bar.ours else PEERS for bar in panel.bars]
    places = range(len(panel.bars))
    axes.barh(places, medians, color=colors, xerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "0.35"})
    for place, bar in zip(places, panel.bars, strict=True):
        axes.text(bar.most + 0.015 * max(medians), place, f"{bar.median:,.0f}", va="center", fontsize=8)
    axes.set_yticks(places, [bar.label for bar in panel.bars], fontsize=8)
    axes.set_xlim(0, 1.17 * max(bar.most for bar in panel.bars))
    axes.set_title("\n".join(textwrap.wrap(panel.title, TITLE_WIDTH)), fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> None:
    """Draws the picture of a folder's figures again."""
    folder = Path(argv[0]) if argv else RESULTS
    draw((folder / "peers.json").read_text(), folder / "peers.png")


if __name__ == "__main__":
    main(sys.argv[1:])
