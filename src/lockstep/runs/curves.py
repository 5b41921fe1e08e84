"""Summarises several seeds as a learning curve: interquartile mean and its bootstrap confidence band.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4: the
interquartile mean is the mean of the middle half of the seeds, and its 95 % interval lies between the quantiles of that
mean over bootstrap samples. The paper stratifies samples by task; here there is one task, so seeds are resampled. Such
an interval of few seeds is too narrow, see :data:`COVERED`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.files import draft_of, is_finite, replace_text
from lockstep.core.shards import keyed_generator
from lockstep.runs.shown.labels import in_a_picture
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl

METRIC = "rollout/episode_return_mean"
IN_A_CURVE = ("iteration", "global_step", METRIC)
RESULT = ("global_step", "state_sha256")
"""Keys of a seed's summary that its group's repeats; they change if the seed is trained further."""
CONFIDENCE, REPETITIONS = 0.95, 2000
COVERED = {2: 0.5, 3: 0.75, 4: 0.87, 5: 0.9, 6: 0.9, 7: 0.91}
"""How often :func:`bootstrap_interval` of so few seeds holds the interquartile mean of all seeds that there could be.

By simulation, of normal, uniform and exponential values alike. More seeds have 0.92 and more.
"""
MOST_POINTS = 500
CURVES_CSV, CURVES_JSON, CURVES_PNG = "curves.csv", "curves.json", "curves.png"
MISSING_PLOT = "{} needs matplotlib; pip install 'lockstep-rl[plot]'"
LINE, SINGLE = "#1f5fa8", "#b0b0b0"


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Averages the last axis without its lowest and highest quarters, each rounded down: ``[…, n]`` to ``[…]``."""
    count = values.shape[-1]
    cut = count // 4
    return np.sort(values, axis=-1)[..., cut : count - cut].mean(-1)


def bootstrap_interval(
    values: np.ndarray, confidence: float = CONFIDENCE, repetitions: int = REPETITIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the percentile interval of the interquartile mean over seeds; all points share the same draws of seeds.

    Args:
        values: ``[points, seeds]``.
        confidence: share of the bootstrap samples inside the interval.
        repetitions: number of bootstrap samples.

    Returns:
        Lower and upper ends, ``[points]`` each.
    """
    count = values.shape[1]
    drawn = keyed_generator(0, "bootstrap").integers(count, size=(repetitions, count))
    tail = 50.0 * (1.0 - confidence)
    ends = [np.percentile(interquartile_mean(row[drawn]), (tail, 100.0 - tail)) for row in values]
    return tuple(np.array(ends).reshape(-1, 2).T)  # pyright: ignore[reportReturnType]


def what_few_cover(seeds: int) -> str:
    """Says in brackets how often the interval of few seeds holds the truth; empty from 8 seeds on."""
    return f" (with {seeds} seeds it covers about {100 * COVERED[seeds]:.0f} %)" if seeds in COVERED else ""


@dataclass(frozen=True)
class Curve:
    """A learning curve over seeds.

    Attributes:
        iterations: of each point.
        global_steps: environment steps of one seed at each point.
        returns: every seed's, float64 ``[points, seeds]``.
        iqm: interquartile mean, ``[points]``.
        band: the lower and upper ends of its confidence interval, ``[points]`` each; None for a single seed.
    """

    iterations: list[int]
    global_steps: list[int]
    returns: np.ndarray
    iqm: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None


def points_of(
    records: Sequence[Sequence[Mapping[str, Any]]], metric: str = METRIC, most: int = MOST_POINTS, peaks: bool = False
) -> list[tuple[Mapping[str, Any], ...]]:
    """Returns the seeds' records of each iteration at which all know the metric, first and last included.

    There are at most ``most``: evenly spaced, or with ``peaks`` the lowest and the highest of each stretch.
    """
    seeds = [{record["iteration"]: record for record in each if _known(record, metric)} for each in records]
    there = [iteration for iteration in seeds[0] if all(iteration in seed for seed in seeds)] if seeds else []
    rows = [tuple(seed[iteration] for seed in seeds) for iteration in there]
    if len(rows) <= most:
        return rows
    if peaks:
        return [rows[index] for index in _peaks(interquartile_mean(_values(rows, metric)), most)]
    return [rows[index] for index in np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]


def _values(rows: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> np.ndarray:
    return np.array([[record[metric] for record in row] for row in rows], np.float64)


def _peaks(values: np.ndarray, most: int) -> list[int]:
    """Returns the places of the first and the last value, and of the lowest and the highest in each stretch between."""
    ends = np.linspace(1, len(values) - 1, most // 2).round().astype(int)
    kept = {0, len(values) - 1}
    for first, end in pairwise(ends):
        stretch = values[first:end]
        kept |= {int(first + stretch.argmin()), int(first + stretch.argmax())}
    return sorted(kept)


def curve_of(
    records: Sequence[Sequence[Mapping[str, Any]]], metric: str = METRIC, most: int = MOST_POINTS, peaks: bool = False
) -> Curve:
    """Returns the curve of a metric over the iterations at which every seed knows it.

    For returns, these are the iterations by which every seed has finished an episode. If there are more than ``most``,
    some become points, see :func:`points_of`.
    """
    rows = points_of(records, metric, most, peaks)
    returns = _values(rows, metric).reshape(-1, len(records))
    band = bootstrap_interval(returns) if len(records) > 1 else None
    first = [row[0] for row in rows]
    iterations, steps = ([record[name] for record in first] for name in ("iteration", "global_step"))
    return Curve(iterations, steps, returns, interquartile_mean(returns), band)


def that_know(records: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> list[Sequence[Mapping[str, Any]]]:
    """Returns the seeds' records that have a number for the metric; the others haven't begun, or never log it."""
    return [each for each in records if any(_known(record, metric) for record in each)]


def seeds_in_a_curve(drawn: int, seeds: int) -> str:
    """Says how many of a group's seeds a curve shows: ``3 of 5 seeds``."""
    of_all = f"{seeds} seed{'s' if seeds > 1 else ''}"
    return f"{drawn} of {of_all}" if drawn < seeds else of_all


def single_seed(name: str, seeds: int) -> str:
    """Names the one seed that a curve or a result shows: ``seed_0 (1 of 5 seeds)``, or ``the only seed``."""
    return f"{name} (1 of {seeds} seeds)" if seeds > 1 else "the only seed"


def counted(summary: Mapping[str, Any], seeds: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Returns those of a group's runs that its result is of: failed ones aren't, until they are as far as the others.

    Args:
        summary: the group's; if it lists none of the runs, the result is of all.
        seeds: the runs' own summaries, by their directories; empty for one that goes on or was killed.
    """
    rows = _rows(summary)
    if not any(seed.name in rows for seed in seeds):
        return list(seeds)
    return [seed for seed, own in seeds.items() if seed.name in rows or (own and _step(own) >= _step(summary))]


def is_current(summary: Mapping[str, Any], seeds: Mapping[Path, Mapping[str, Any]]) -> bool:
    """Tells whether a group's summary is still that of its runs: none was trained by itself since it was written.

    Arguments are as in :func:`counted`. A summary that lists no runs is taken as it is.
    """
    rows = _rows(summary)
    ends = [(rows.get(seed.name), seeds[seed]) for seed in counted(summary, seeds)] if rows else []
    return all(row is not None and all(own.get(key) == row[key] for key in RESULT if key in row) for row, own in ends)


def _rows(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns what a group's summary says of each run, by the name of its directory."""
    rows = summary.get("seeds")
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {row["directory"]: row for row in known if isinstance(row.get("directory"), str)}


def _step(summary: Mapping[str, Any]) -> float:
    step = summary.get(RESULT[0])
    return step if is_finite(step) else 0


def _known(record: Mapping[str, Any], metric: str) -> bool:
    return is_finite(record.get(metric))


def _read_returns(path: Path) -> list[dict[str, Any]]:
    """Reads only the metrics that a curve needs, because the records of all seeds are held at once."""
    records = read_jsonl(path / METRICS_JSONL, "iteration", "global_step")
    return [{name: x for name in IN_A_CURVE if (x := record.get(name)) is not None} for record in records]


def write_curves(path: Path, seeds: Mapping[int, Path]) -> Curve:
    """Writes the curve of the runs ``seeds`` into a directory, as ``curves.csv`` and ``curves.json``, and returns it.

    Args:
        path: directory to write to.
        seeds: run directories by seed.
    """
    curve = curve_of([_read_returns(directory) for directory in seeds.values()])
    names = ["iteration", "global_step", "iqm", "low", "high", *(f"seed_{seed}" for seed in seeds)]
    ends = [[None] * len(curve.iterations)] * 2 if curve.band is None else [end.tolist() for end in curve.band]
    columns = [curve.iterations, curve.global_steps, curve.iqm.tolist(), *ends]
    table = list(zip(*columns, *curve.returns.T.tolist(), strict=True))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *table])
    replace_text(path / CURVES_CSV, text.getvalue())
    facts = {"metric": METRIC, "statistic": "interquartile mean over seeds", "seeds": list(seeds)}
    facts |= {"interval": "percentile bootstrap over seeds", "confidence": CONFIDENCE, "repetitions": REPETITIONS}
    points = [dict(zip(names, row, strict=True)) for row in table]
    replace_text(path / CURVES_JSON, json.dumps(facts | {"points": points}, indent=1) + "\n")
    return curve


def can_plot() -> bool:
    """Tells whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def without_latex() -> Iterator[None]:
    """Lets matplotlib set text by itself, even if the user's ``matplotlibrc`` asks for LaTeX.

    LaTeX may be missing, and it takes an underscore in a name for a command. Needed both while a figure is made and
    while it is saved; also works as a decorator.
    """
    from matplotlib import rc_context

    with rc_context({"text.usetex": False}):
        yield


@without_latex()
def draw_curves(path: Path, title: str, curve: Curve, alone: str) -> None:
    """Draws a curve into a directory, as ``curves.png``, unless it has no points; arguments are as in :func:`draw`."""
    if curve.iterations:
        with draft_of(path / CURVES_PNG) as draft:
            draw(title, curve, alone).savefig(draft, dpi=120)


def draw(title: str, curve: Curve, alone: str) -> Any:
    """Draws the interquartile mean with its band, and a thin line for every seed, as a matplotlib figure.

    A single seed is drawn as one line with the label ``alone``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axis = figure.subplots()
    if curve.band is None:
        axis.plot(curve.global_steps, curve.iqm, color=LINE, label=alone)
    else:
        axis.plot(curve.global_steps, curve.returns, color=SINGLE, linewidth=0.7)
        axis.fill_between(curve.global_steps, *curve.band, color=LINE, alpha=0.25, linewidth=0)
        seeds = curve.returns.shape[1]
        label = f"interquartile mean, 95 % confidence band{what_few_cover(seeds)}"
        axis.plot(curve.global_steps, curve.iqm, color=LINE, label=label)
        axis.plot([], [], color=SINGLE, linewidth=0.7, label=f"each of {seeds} seeds")
    axis.set_title(in_a_picture(title), fontsize=11)
    axis.set_xlabel("environment steps of a seed")
    axis.set_ylabel("mean return of the last 100 episodes")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
