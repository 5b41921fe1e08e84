"""Draws ``plan.png``: steps/s with their range, and where an iteration's time goes, by number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.planning.prediction import PARTS, Outlook
from lockstep.planning.report import amount, duration
from lockstep.runs.curves import without_latex

COLORS = ("#1f5fa8", "#d9822b", "#2f7f5f", "#8e44ad", "#c0392b", "#16808c")
PART_COLORS = dict(
    zip(PARTS, ("#7fb069", "#2f7f5f", "#5fa8d3", "#1f5fa8", "#10243f", "#c0392b", "#e8a33d", "#b0b0b0"), strict=True)
)


def write_plot(path: Path, title: str, outlooks: Sequence[Outlook]) -> None:
    """Draws the outlooks into an image file."""
    with without_latex():
        draw(title, outlooks).savefig(path, dpi=120)


def draw(title: str, outlooks: Sequence[Outlook]) -> Any:
    """Draws the figure: a panel of speeds, and for each target a panel of an iteration's parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 + 4.4 * len(outlooks), 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, 1 + len(outlooks), squeeze=False)[0]
    _speeds(axes[0], outlooks)
    for axis, outlook in zip(axes[1:], outlooks, strict=True):
        _parts(axis, outlook)
    for axis in axes:
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*_legend(axes[1:]), loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    return figure


def _legend(axes: Sequence[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = [name for name in PARTS if name in found]
    return [found[name] for name in names], names


def _speeds(axis: Any, outlooks: Sequence[Outlook]) -> None:
    sizes = sorted({one.devices for outlook in outlooks for one in outlook.predictions})
    for color, outlook in zip(COLORS * len(outlooks), outlooks, strict=False):
        at = [one.devices for one in outlook.predictions]
        rates = [one.rates for one in outlook.predictions]
        ideal = [rates[0]["likely"] * n / at[0] for n in at]
        axis.plot(at, ideal, "--", color=color, linewidth=1.0, alpha=0.5)
        axis.fill_between(at, [r["worst"] for r in rates], [r["best"] for r in rates], color=color, alpha=0.15)
        axis.plot(at, [r["likely"] for r in rates], "o-", color=color, label=outlook.target, linewidth=1.8)
        for n, rate, one in zip(at, rates, outlook.predictions, strict=True):
            if outlook.fits(one) is False:
                axis.plot([n], [rate["likely"]], "x", color="#c0392b", markersize=11, zorder=5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: amount(value))
    axis.set_xlabel("devices")
    axis.set_title("environment steps/s (band: range; dashes: linear; x: doesn't fit)", fontsize=9)
    axis.legend(frameon=False, fontsize=8)


def _parts(axis: Any, outlook: Outlook) -> None:
    there = outlook.predictions
    totals, below = [sum(one.parts.values()) for one in there], [0.0] * len(there)
    for name in PARTS:
        heights = [one.parts[name] / total for one, total in zip(there, totals, strict=True)]
        if any(height > 0 for height in heights):
            axis.bar(range(len(there)), heights, 0.7, below, color=PART_COLORS[name], label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for place, one in enumerate(there):
        axis.annotate(
            duration(one.seconds["likely"]).replace(" ", "\n"),
            (place, 1.0),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xticks(range(len(there)), [str(one.devices) for one in there])
    axis.set_xlabel("devices")
    axis.set_ylim(0, 1.12)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")
    axis.set_title(f"{outlook.target}: shares of an iteration, likely", fontsize=9)
