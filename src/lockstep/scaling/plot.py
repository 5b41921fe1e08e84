"""Draws ``plots.png``: steps/s, efficiency and where an iteration's time goes, by number of ranks; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.curves import without_latex
from lockstep.scaling.summarize import PARTS, Row

MEASURED, CEILING, IDEAL = "#1f5fa8", "#d9822b", "#8a8a8a"
COLORS = dict(zip(PARTS, ("#2f7f5f", "#1f5fa8", "#c0392b", "#e8a33d", "#b0b0b0"), strict=True))
MEANING = {
    "t_rollout": "rollout",
    "t_learn": "learn",
    "t_comm": "comm (inside collectives)",
    "t_wait": "wait (for the slowest rank)",
    "t_other": "other (metrics, logging)",
}


def write_plots(path: Path, title: str, rows: Sequence[Row], summary: Sequence[Row]) -> bool:
    """Draws a sweep's tables into an image file, or removes the file if there is nothing to draw; returns which."""
    if not any(row["runs"] for row in summary):
        path.unlink(missing_ok=True)
        return False
    with without_latex():
        draw(title, rows, summary).savefig(path, dpi=120)
    return True


def draw(title: str, rows: Sequence[Row], summary: Sequence[Row]) -> Any:
    """Draws the figure: three panels over the world sizes that have a run.

    What is ideal follows from the summary's first world size, as in the tables; if that has no run, it isn't drawn.
    """
    from matplotlib.figure import Figure

    there = [row for row in summary if row["runs"]]
    figure = Figure(figsize=(13.5, 4.3), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, 3)
    _speed(axes[0], rows, there, has_base=there[0] is summary[0])
    _efficiency(axes[1], there)
    _parts(axes[2], there)
    for axis in axes:
        axis.set_xticks(range(len(there)), [str(row["world_size"]) for row in there])
        axis.set_xlim(-0.6, len(there) - 0.4)
        axis.set_xlabel("ranks")
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _speed(axis: Any, rows: Sequence[Row], there: Sequence[Row], has_base: bool) -> None:
    places, base = range(len(there)), there[0]
    if has_base:
        ideal = [base["steps_per_second"] * row["world_size"] / base["world_size"] for row in there]
        axis.plot(places, ideal, "--", color=IDEAL, linewidth=1.3, label="ideal: linear")
    _line(axis, there, "ceiling_steps_per_second", "s-", CEILING, "ceiling: independent runs at once", markersize=5)
    _line(axis, there, "steps_per_second", "o-", MEASURED, "measured")
    for place, row in zip(places, there, strict=True):
        of_repeats = [
            r["steps_per_second"]
            for r in rows
            if (r["kind"], r["status"], r["world_size"]) == ("run", "ok", row["world_size"])
        ]
        axis.plot([place] * len(of_repeats), of_repeats, ".", color="#10243f", markersize=4, zorder=4)
    axis.set_title("environment steps per second (dots: repeats)", fontsize=10)
    axis.set_ylim(0, None)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    axis.legend(frameon=False, fontsize=8, loc="best")


def _efficiency(axis: Any, there: Sequence[Row]) -> None:
    axis.axhline(1.0, linestyle="--", color=IDEAL, linewidth=1.3)
    shown = (("efficiency", MEASURED, "of ideal", -0.06), ("ceiling_efficiency", CEILING, "of the ceiling", 0.06))
    tops = [1.0]
    for name, color, label, shift in shown:
        known = [(place, row) for place, row in enumerate(there) if row[name] is not None]
        for place, row in known:
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            tops.append(row[name])
            if low is not None and high is not None:
                axis.plot([place + shift] * 2, [max(0.0, low), high], color=color, linewidth=1.6)
                tops.append(min(high, 1.4))
            place_of_text = (6 if shift > 0 else -6, 0)
            axis.annotate(
                f"{row[name]:.0%}",
                (place + shift, row[name]),
                place_of_text,
                textcoords="offset points",
                ha="left" if shift > 0 else "right",
                va="center",
                fontsize=8,
                color=color,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
        if known:
            axis.plot([p + shift for p, _ in known], [r[name] for _, r in known], "o", color=color, label=label)
    axis.set_title("efficiency (bars: 95 % confidence)", fontsize=10)
    axis.set_ylim(0, 1.08 * max(tops))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, loc="lower left")


def _parts(axis: Any, there: Sequence[Row]) -> None:
    below = [0.0] * len(there)
    for name in PARTS:
        heights = [1000 * (row[name] or 0.0) for row in there]
        if any(row[name] is not None for row in there):
            axis.bar(range(len(there)), heights, 0.55, below, color=COLORS[name], label=MEANING[name])
        below = [a + b for a, b in zip(below, heights, strict=True)]
    if any(row[name] is None for row in there for name in PARTS):  # a compiled program doesn't time its parts
        rest = [max(0.0, 1000 * row["t_iter"] - known) for row, known in zip(there, below, strict=True)]
        axis.bar(range(len(there)), rest, 0.55, below, color="0.7", label="not told apart")
        below = [a + b for a, b in zip(below, rest, strict=True)]
    for place, row in enumerate(there):
        axis.annotate(
            f"{1000 * row['t_iter']:{',.0f' if row['t_iter'] >= 0.1 else '.3g'}}",
            (place, below[place]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_title("milliseconds of an iteration, mean over ranks", fontsize=10)
    axis.set_ylim(0, 1.35 * max(*below, 1e-9))
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="upper left", ncols=2)


def _line(axis: Any, there: Sequence[Row], name: str, style: str, color: str, label: str, **more: Any) -> None:
    known = [(place, row[name]) for place, row in enumerate(there) if row[name] is not None]
    if known:
        axis.plot(*zip(*known, strict=True), style, color=color, label=label, linewidth=1.8, **more)
