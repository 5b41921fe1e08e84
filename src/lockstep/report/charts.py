"""Gathers the lines of each chart: each run's metric over steps, seconds and iterations, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.report.reading import RunFiles
from lockstep.runs.curves import (
    METRIC,
    MOST_POINTS,
    curve_of,
    points_of,
    seeds_in_a_curve,
    that_know,
    what_few_cover,
)
from lockstep.runs.listing import number
from lockstep.runs.plot import places_of, stand_still

EVALUATION = "eval/return_mean"
TITLES = {
    METRIC: "Mean return of the last 100 episodes",
    EVALUATION: "Mean return of evaluations",
    "rollout/success_rate": "Success rate",
    "rollout/episode_length_mean": "Mean length of episodes",
    "train/policy_loss": "Policy loss",
    "train/value_loss": "Value loss",
    "train/entropy": "Entropy",
    "train/approx_kl": "Approximate KL divergence",
    "train/clip_fraction": "Clip fraction",
    "train/explained_variance": "Explained variance",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "time/global_fps": "Environment steps per second",
}
LARGE = (METRIC, EVALUATION)
LOGGED = {
    "rollout/": ("episode_return_min", "episode_return_max", "episodes"),
    "train/": ("loss", "reference_kl", "entropy_coef", "clip_range", "optimizer_steps", "stopped_by_kl"),
    "eval/": (
        *("episodes", "length_mean", "success_rate", "return_std", "return_min", "return_max"),
        *("score_mean", "score_std", "score_min", "score_max"),
    ),
}
"""Keys that Lockstep logs besides those of :data:`TITLES`, by their beginnings."""
KNOWN = {"iteration", "global_step", *TITLES, *(start + name for start, names in LOGGED.items() for name in names)}
"""Keys that Lockstep logs. All others but ``time/…`` are the user's; ``rollout/metrics/…`` are the environment's."""
MOST_OWN = 12
FEWER_POINTS = 200
"""The most points of a line in a small chart."""


@dataclass(frozen=True)
class Series:
    """One run's line in a chart; lists are ``[points]``.

    Of more iterations than a chart has points, some are left out, but never the first, the last, and the lowest and
    highest of each stretch.

    Attributes:
        label: the run's name.
        color: the number of its colour on the page.
        x: places by what the line is drawn over: ``steps``, ``time`` and ``iterations``.
        y: the metric; of several seeds its interquartile mean.
        band: lower and upper ends of an interval; None if there is none.
        interval: what the band is, in words.
        seeds: each seed's values.
    """

    label: str
    color: int
    x: dict[str, list[float]]
    y: list[float]
    band: tuple[list[float], list[float]] | None = None
    interval: str = ""
    seeds: list[list[float]] = field(default_factory=list)

    def in_words(self, over: str) -> str:
        """Describes the line over one of the keys of ``x`` in a sentence, for readers who can't see it."""
        y, x, what = self.y, self.x[over], over.removesuffix("s")
        best = max(range(len(y)), key=y.__getitem__)
        return (
            f"{self.label}: {y[0]:.4g} at {what} {x[0]:,.0f}, highest {y[best]:.4g} at {what} {x[best]:,.0f}, "
            f"last {y[-1]:.4g} at {what} {x[-1]:,.0f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns what the page's script draws, as JSON types."""
        band = None if self.band is None else [_short(end) for end in self.band]
        return {
            "label": self.label,
            "color": self.color,
            "x": {name: _short(values) for name, values in self.x.items()},
            "y": _short(self.y),
            "band": band,
            "interval": self.interval,
            "seeds": [_short(values) for values in self.seeds],
        }


@dataclass(frozen=True)
class Chart:
    """A chart of one metric, a key of ``metrics.jsonl``, for all runs that have it."""

    key: str
    title: str
    series: list[Series]

    @property
    def is_large(self) -> bool:
        """Whether the chart has the page's whole width."""
        return self.key in LARGE

    @property
    def over(self) -> str:
        """What the chart is drawn over: ``steps``, or ``iterations`` if its runs take no steps (a clone's epochs)."""
        return "iterations" if stand_still([series.x["steps"] for series in self.series]) else "steps"

    def in_words(self) -> str:
        """Describes the chart in sentences."""
        return f"{self.title}. {'; '.join(series.in_words(self.over) for series in self.series)}."


def _short(values: Sequence[float]) -> list[float]:
    """Rounds values to seven digits: more can't be seen, and the page holds many."""
    return [float(f"{value:.7g}") for value in values]


def charts_of(runs: Sequence[RunFiles]) -> list[Chart]:
    """Returns the charts for which some run has numbers, in the order of :data:`TITLES`, then the users' metrics."""
    every = dict.fromkeys(key for run in runs for records in run.records for record in records for key in record)
    logged = [key for key in every if key not in KNOWN and not key.startswith("time/")][:MOST_OWN]
    found = []
    for key, title in (TITLES | {key: key for key in logged}).items():
        lines = [series_of(run, place, key) for place, run in enumerate(runs)] if key in every else []
        there = [line for line in lines if line is not None]
        if there:
            found.append(Chart(key, title, there))
    return found


def extent_of(charts: Sequence[Chart], over: str = "steps") -> tuple[float, float]:
    """Returns the first and the last step (or iteration) of all charts drawn over these, so that their axes agree."""
    places = [place for chart in charts if chart.over == over for series in chart.series for place in series.x[over]]
    return min(places, default=0.0), max(places, default=0.0)


def series_of(run: RunFiles, color: int, key: str) -> Series | None:
    """Returns a run's line of a metric, of several seeds that of those that haven't failed; None without a number."""
    if not run.seeds:
        return _single(run, color, key)
    records = that_know([records for seed in run.counted for records in seed.records], key)
    if not records:
        return None
    curve = curve_of(records, key, MOST_POINTS if key in LARGE else FEWER_POINTS, peaks=True)
    if not curve.iterations:
        return None
    label = f"{run.name} ({seeds_in_a_curve(len(records), len(run.seeds))})"
    band = None if curve.band is None else (curve.band[0].tolist(), curve.band[1].tolist())
    seeds = curve.returns.T.tolist() if key in LARGE else []
    places = _places(records[0], curve.iterations)
    interval = f"95 % interval of the interquartile mean{what_few_cover(len(records))}"
    return Series(label, color, places, curve.iqm.tolist(), band, interval, seeds)


def _single(run: RunFiles, color: int, key: str) -> Series | None:
    rows = [row[0] for row in points_of(run.records, key, MOST_POINTS if key in LARGE else FEWER_POINTS, peaks=True)]
    if not rows:
        return None
    values = [float(row[key]) for row in rows]
    places = _places(run.records[0], [row["iteration"] for row in rows])
    deviations = [number(row, "eval/return_std") for row in rows] if key == EVALUATION else []
    if not deviations or None in deviations:
        return Series(run.name, color, places, values)
    pairs = list(zip(values, (each or 0.0 for each in deviations), strict=True))
    band = ([mean - std for mean, std in pairs], [mean + std for mean, std in pairs])
    return Series(run.name, color, places, values, band, "standard deviation over episodes")


def _places(records: Sequence[Mapping[str, Any]], iterations: Sequence[int]) -> dict[str, list[float]]:
    """Returns the places of iterations in steps, time and iterations."""
    places = {x: places_of(records, x) for x in ("steps", "time", "iterations")}
    return {x: [float(at[iteration]) for iteration in iterations] for x, at in places.items()}
