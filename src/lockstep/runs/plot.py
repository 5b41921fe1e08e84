"""Draws a metric of several runs in one picture, over steps, time or iterations; needs matplotlib."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lockstep.core.files import is_finite
from lockstep.runs.curves import METRIC, counted, curve_of, seeds_in_a_curve, that_know, without_latex
from lockstep.runs.directory import SUMMARY
from lockstep.runs.finding import seeds_in
from lockstep.runs.listing import object_if_any
from lockstep.runs.shown.labels import add_legend, in_a_picture, style_of
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl

Records = list[dict[str, Any]]
TIME = "time/t_iter"
X_LABELS = {"steps": "environment steps", "time": "seconds of training", "iterations": "iterations"}
OF_SEEDS = "interquartile mean of seeds, with its 95 % interval (of few seeds it covers less)"
Y_LABELS = {METRIC: "mean return of the last 100 episodes"}


@dataclass(frozen=True)
class Line:
    """The line of one run, or of a group of seeds.

    Attributes:
        label: its name in the picture.
        x: positions on the horizontal axis, ``[points]``.
        y: the metric, ``[points]``; for a group, its interquartile mean over seeds.
        band: lower and upper ends of that mean's 95 % interval, ``[points]`` each; None for a single seed.
    """

    label: str
    x: list[float]
    y: list[float]
    band: tuple[list[float], list[float]] | None = None


def line_of(path: Path, label: str, x: str, y: str) -> Line:
    """Reads the line of a run, or of those seeds of a group that have logged the metric and haven't failed.

    Args:
        path: the run's directory.
        label: its name in the picture.
        x: ``steps``, ``time`` (the sum of the iterations' times) or ``iterations``.
        y: a key of ``metrics.jsonl``.

    Raises:
        ValueError: the run has no numbers under that key; one line.
    """
    seeds = {seed: object_if_any(seed / SUMMARY) for seed in seeds_in(path)}
    begun = [each for each in counted(object_if_any(path / SUMMARY), seeds) if (each / METRICS_JSONL).is_file()]
    records = [records_of(each) for each in begun or [path]]
    drawn = that_know(records, y)
    curve = curve_of(drawn, y, peaks=True) if drawn else None
    if curve is None or not curve.iterations:
        raise ValueError(_nothing(label, y, records))
    places = places_of(drawn[0], x)
    at = [places[iteration] for iteration in curve.iterations]
    band = None if curve.band is None else (curve.band[0].tolist(), curve.band[1].tolist())
    if seeds:
        label = f"{label} ({seeds_in_a_curve(len(drawn), len(seeds))})"
    return Line(label, at, curve.iqm.tolist(), band)


def lines_of(named: Mapping[Path, str], x: str, y: str) -> tuple[list[Line], str]:
    """Reads the lines of runs, whose labels are given by directory; raises as :func:`line_of` does.

    Returns:
        The lines, and what their horizontal axis shows: ``x``, or iterations in place of steps if the runs take no
        steps, as in cloning.
    """
    lines = [line_of(path, label, x, y) for path, label in named.items()]
    if x != "steps" or not stand_still([line.x for line in lines]):
        return lines, x
    return [line_of(path, label, "iterations", y) for path, label in named.items()], "iterations"


def stand_still(places: Sequence[Sequence[float]]) -> bool:
    """Tells whether every line keeps to a single place on its axis, although one has several points."""
    return all(len(set(each)) == 1 for each in places) and any(len(each) > 1 for each in places)


def records_of(path: Path) -> Records:
    """Reads the metrics records of a run directory, except for a torn last line.

    Raises:
        ValueError: there is no such file, or another line is no record; one line.
    """
    file = path / METRICS_JSONL
    if not file.is_file():
        raise ValueError(f"plot: {path} has no {METRICS_JSONL}")
    try:
        return read_jsonl(file, "iteration", "global_step")
    except ValueError as error:
        raise ValueError(f"plot: {error}") from None


def places_of(records: Sequence[Mapping[str, Any]], x: str) -> dict[int, float]:
    """Returns each iteration's position on the horizontal axis."""
    iterations = [record["iteration"] for record in records]
    if x == "iterations":
        return {iteration: iteration for iteration in iterations}
    if x == "steps":
        return {record["iteration"]: record["global_step"] for record in records}
    return dict(zip(iterations, accumulate(_seconds(record) for record in records), strict=True))


def _seconds(record: Mapping[str, Any]) -> float:
    value = record.get(TIME)
    return float(value) if is_finite(value) else 0.0


def _nothing(label: str, y: str, records: Sequence[Records]) -> str:
    """Says why a run has no line: its records lack the key, or have no number under it yet."""
    keys = dict.fromkeys(key for each in records for record in each for key in record)
    if y in keys or not keys:
        return f"plot: {label} has no {y} yet"
    ends = [key for key in keys if key.rpartition("/")[2] == y]
    close = ends or difflib.get_close_matches(y, keys, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(keys)}"
    return f"plot: {label} has no {y}; {hint}"


@without_latex()
def draw(lines: Sequence[Line], x: str, y: str) -> Any:
    """Draws a line for each run, with a band for those of several seeds, as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axis = figure.subplots()
    names = [in_a_picture(line.label) for line in lines]
    for place, line in enumerate(lines):
        look: Any = {"marker": "." if len(line.x) == 1 else "", "linestyle": style_of(place), "label": names[place]}
        (drawn,) = axis.plot(line.x, line.y, **look)
        if line.band is not None:
            low, high = line.band
            axis.fill_between(line.x, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    axis.set_xlabel(X_LABELS[x])
    axis.set_ylabel(Y_LABELS.get(y, y))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    of_seeds = any(line.band is not None for line in lines)
    add_legend(figure, names, OF_SEEDS if of_seeds else None)
    return figure
