"""Sums up several seeds in a learning curve: interquartile mean and its bootstrap confidence band.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4: the
interquartile mean is the mean of the middle half of the seeds, and its 95 % interval is what lies between the quantiles
of that number over bootstrap samples, which are stratified by task: here there is one, so seeds are drawn from seeds.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.files import is_finite
from lockstep.core.shards import keyed_generator
from lockstep.runs.directory import SEED
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl

METRIC = "rollout/episode_return_mean"
IN_A_CURVE = ("iteration", "global_step", METRIC)
CONFIDENCE, REPETITIONS = 0.95, 2000
MOST_POINTS = 500
CURVES_CSV, CURVES_JSON, CURVES_PNG = "curves.csv", "curves.json", "curves.png"
MISSING_PLOT = "{} needs matplotlib; pip install 'lockstep-rl[plot]'"
LINE, SINGLE = "#1f5fa8", "#b0b0b0"


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without a quarter of it, rounded down, at either end: ``[…, n]`` to ``[…]``."""
    count = values.shape[-1]
    cut = count // 4
    return np.sort(values, axis=-1)[..., cut : count - cut].mean(-1)


def bootstrap_interval(
    values: np.ndarray, confidence: float = CONFIDENCE, repetitions: int = REPETITIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the interquartile mean over seeds; every point has the same draws of seeds.

    Args:
        values: ``[points, seeds]``.
        confidence: share of the bootstrap samples inside.
        repetitions: bootstrap samples.

    Returns:
        Lower and upper ends, ``[points]`` each.
    """
    count = values.shape[1]
    drawn = keyed_generator(0, "bootstrap").integers(count, size=(repetitions, count))
    tail = 50.0 * (1.0 - confidence)
    ends = [np.percentile(interquartile_mean(row[drawn]), (tail, 100.0 - tail)) for row in values]
    return tuple(np.array(ends).reshape(-1, 2).T)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Curve:
    """A learning curve over seeds.

    Attributes:
        iterations: of each point, and ``global_steps`` environment steps of one seed.
        returns: of every seed, float64 ``[points, seeds]``.
        iqm: interquartile mean, ``[points]``.
        band: the lower and upper ends of its confidence interval, ``[points]`` each; None of a single seed.
    """

    iterations: list[int]
    global_steps: list[int]
    returns: np.ndarray
    iqm: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None


def points_of(
    records: Sequence[Sequence[Mapping[str, Any]]], metric: str = METRIC, most: int = MOST_POINTS
) -> list[tuple[Mapping[str, Any], ...]]:
    """Each seed's record of the iterations of which every seed's metric is known; of many, ``most`` evenly spaced."""
    seeds = [{record["iteration"]: record for record in each if _known(record, metric)} for each in records]
    there = [iteration for iteration in seeds[0] if all(iteration in seed for seed in seeds)] if seeds else []
    rows = [tuple(seed[iteration] for seed in seeds) for iteration in there]
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(int))
    return [rows[index] for index in kept]


def curve_of(records: Sequence[Sequence[Mapping[str, Any]]], metric: str = METRIC, most: int = MOST_POINTS) -> Curve:
    """The curve of a metric of each seed's records, over the iterations of which every seed's is known.

    For returns those are the ones by which every seed has finished an episode. Where there are more than ``most``,
    evenly spaced ones become points.
    """
    rows = points_of(records, metric, most)
    returns = np.array([[record[metric] for record in row] for row in rows], np.float64).reshape(-1, len(records))
    band = bootstrap_interval(returns) if len(records) > 1 else None
    first = [row[0] for row in rows]
    iterations, steps = ([record[name] for record in first] for name in ("iteration", "global_step"))
    return Curve(iterations, steps, returns, interquartile_mean(returns), band)


def that_know(records: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> list[Sequence[Mapping[str, Any]]]:
    """Those of several seeds' records in which there is a number of a metric: others haven't begun, or never will."""
    return [each for each in records if any(_known(record, metric) for record in each)]


def seeds_in_a_curve(drawn: int, seeds: int) -> str:
    """Says how many of a group's seeds a curve is of."""
    of_all = f"{seeds} seed{'s' if seeds > 1 else ''}"
    return f"{drawn} of {of_all}" if drawn < seeds else of_all


def single_seed(name: str, seeds: int) -> str:
    """Says which seed a curve, or a result, is of where it is of one alone, by its name and its group's number."""
    return f"{name} (1 of {seeds} seeds)" if seeds > 1 else "the only seed"


def _known(record: Mapping[str, Any], metric: str) -> bool:
    return is_finite(record.get(metric))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The metrics records of a run directory, as :func:`~lockstep.runs.trackers.jsonl.read_jsonl`."""
    return read_jsonl(path / METRICS_JSONL)


def _read_returns(path: Path) -> list[dict[str, Any]]:
    """What a curve needs of :func:`read_records`: those of all seeds of a group are held at once."""
    records = read_jsonl(path / METRICS_JSONL, "iteration", "global_step")
    return [{name: x for name in IN_A_CURVE if (x := record.get(name)) is not None} for record in records]


def write_curves(path: Path, title: str, seeds: Mapping[int, Path], count: int | None = None) -> Curve:
    """Write ``curves.csv``, ``curves.json`` and, with matplotlib, ``curves.png`` of several seeds' run directories.

    ``count``: how many seeds the group has, of which some may have left nothing yet; None: as many as are given.
    """
    curve = curve_of([_read_returns(directory) for directory in seeds.values()])
    names = ["iteration", "global_step", "iqm", "low", "high", *(f"seed_{seed}" for seed in seeds)]
    ends = [[None] * len(curve.iterations)] * 2 if curve.band is None else [end.tolist() for end in curve.band]
    columns = [curve.iterations, curve.global_steps, curve.iqm.tolist(), *ends]
    table = list(zip(*columns, *curve.returns.T.tolist(), strict=True))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *table])
    (path / CURVES_CSV).write_text(text.getvalue())
    facts = {"metric": METRIC, "statistic": "interquartile mean over seeds", "seeds": list(seeds)}
    facts |= {"interval": "stratified bootstrap", "confidence": CONFIDENCE, "repetitions": REPETITIONS}
    points = [dict(zip(names, row, strict=True)) for row in table]
    (path / CURVES_JSON).write_text(json.dumps(facts | {"points": points}, indent=1) + "\n")
    if can_plot() and points:
        alone = single_seed(f"{SEED}{next(iter(seeds))}", count or len(seeds))
        draw(title, curve, alone).savefig(path / CURVES_PNG, dpi=120)
    return curve


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(title: str, curve: Curve, alone: str) -> Any:
    """The figure: the interquartile mean with its band, and a thin line for every seed.

    A curve of a single seed is drawn as that, and called ``alone``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axis = figure.subplots()
    if curve.band is None:
        axis.plot(curve.global_steps, curve.iqm, color=LINE, label=alone)
    else:
        axis.plot(curve.global_steps, curve.returns, color=SINGLE, linewidth=0.7)
        axis.fill_between(curve.global_steps, *curve.band, color=LINE, alpha=0.25, linewidth=0)
        axis.plot(curve.global_steps, curve.iqm, color=LINE, label="interquartile mean, 95 % confidence band")
        axis.plot([], [], color=SINGLE, linewidth=0.7, label=f"each of {curve.returns.shape[1]} seeds")
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("environment steps of a seed")
    axis.set_ylabel("mean return of the last 100 episodes")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
