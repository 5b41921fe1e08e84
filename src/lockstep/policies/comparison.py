"""Compares evaluations: means with confidence intervals, effect sizes, and how often one beats the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.shards import keyed_generator
from lockstep.policies.results import columns_of, edges_of

CONFIDENCE, REPETITIONS = 0.95, 2000
COLOURS = ("#1f5fa8", "#d9822b", "#2f7f5f", "#c0392b", "#7a5195", "#8a8a8a")
METRICS = ("return", "score", "length")
LEAST_EPISODES, LARGEST_EFFECT = 10, 10.0
"""Cohen's d is of so many episodes of each at least: of fewer it is mostly chance, and too large by more than 4 %. And
of no more standard deviations: beyond, episodes hardly vary, and it measures that instead of the difference."""


@dataclass(frozen=True)
class Evaluated:
    """The episodes of one policy.

    Attributes:
        name: what it is called.
        facts: about it, as ``lockstep eval --json FILE`` writes them.
        table: float64 ``[n, 4]``, see :func:`lockstep.policies.evaluation.run_episodes`.
    """

    name: str
    facts: dict[str, Any]
    table: np.ndarray

    def values(self, metric: str) -> np.ndarray | None:
        """One number an episode, ``[n]``; None where not every episode has it."""
        column = columns_of(self.table).get(metric)
        return None if column is None or None in column else np.asarray(column, np.float64)


def interval(
    statistic: Callable[..., float], *samples: np.ndarray, repetitions: int = REPETITIONS, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval (Efron 1979) of a statistic of independent samples ``[n]``, of any lengths."""
    generator = keyed_generator(seed, "bootstrap")
    found = [statistic(*(x[generator.integers(len(x), size=len(x))] for x in samples)) for _ in range(repetitions)]
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(found, (tail, 100.0 - tail))
    return float(low), float(high)


def cohens_d(x: np.ndarray, y: np.ndarray) -> float | None:
    """Difference of means ``y - x`` over the pooled standard deviation (Cohen 1988); None where nothing varies.

    The pooled variance is ``((n_x - 1) s_x² + (n_y - 1) s_y²) / (n_x + n_y - 2)``.
    """
    freedom = len(x) + len(y) - 2
    if freedom < 1:
        return None
    squares = np.square(x - x.mean()).sum() + np.square(y - y.mean()).sum()
    return float((y.mean() - x.mean()) / np.sqrt(squares / freedom)) if squares > 0 else None


def effect_size(x: np.ndarray, y: np.ndarray) -> tuple[float | None, str | None]:
    """:func:`cohens_d` where it says something, else None and why not."""
    fewest = min(len(x), len(y))
    if fewest < LEAST_EPISODES:
        return None, f"of {fewest} episodes it would be mostly chance; it takes {LEAST_EPISODES} of each"
    d = cohens_d(x, y)
    if d is None:
        return None, "no episode differs from the others of its policy"
    if abs(d) > LARGEST_EFFECT:
        return None, f"episodes hardly vary beside the difference, which is over {LARGEST_EFFECT:g} standard deviations"
    return d, None


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """Estimates how probable it is that an episode of ``y`` beats one of ``x``, a tie counting half.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4.3: the
    Mann-Whitney U statistic over ``n_x n_y``.
    """
    ordered = np.sort(x)
    below, up_to = np.searchsorted(ordered, y, "left"), np.searchsorted(ordered, y, "right")
    return float((below + up_to).sum() / (2 * len(x) * len(y)))


def describe_metric(values: np.ndarray) -> dict[str, float]:
    """Mean with its confidence interval, standard deviation, quartiles and range of ``[n]``."""
    low, high = interval(lambda x: float(x.mean()), values)
    quartiles = dict(zip(("q25", "median", "q75"), np.percentile(values, (25, 50, 75)).tolist(), strict=True))
    facts = {"mean": float(values.mean()), "mean_low": low, "mean_high": high, "std": float(values.std())}
    return facts | quartiles | {"min": float(values.min()), "max": float(values.max())}


def against(x: np.ndarray, y: np.ndarray) -> dict[str, float | str | None]:
    """Measures how far ``y`` is above ``x``: difference of means, probability of improvement, intervals; Cohen's d."""
    d, why_none = effect_size(x, y)
    low, high = interval(lambda a, b: float(b.mean() - a.mean()), x, y)
    better = interval(probability_of_improvement, x, y)
    return {
        "difference": float(y.mean() - x.mean()),
        "difference_low": low,
        "difference_high": high,
        "cohens_d": d,
        "no_cohens_d": why_none,
        "probability_of_improvement": probability_of_improvement(x, y),
        "probability_low": better[0],
        "probability_high": better[1],
    }


def metrics_of(all_of_them: Sequence[Evaluated]) -> list[str]:
    """The metrics that every episode of every policy has."""
    return [name for name in METRICS if all(each.values(name) is not None for each in all_of_them)]


def comparison(all_of_them: Sequence[Evaluated]) -> dict[str, Any]:
    """Each policy in numbers, and all but the first one against the first, as JSON would have it.

    Raises:
        ValueError: there are less than two, or they played different environments; one line.
    """
    if len(all_of_them) < 2:
        raise ValueError(f"compare: {len(all_of_them)} of them; give two or more runs or evaluations")
    places = {each.facts["environment"] for each in all_of_them}
    if len(places) > 1:
        raise ValueError(f"compare: these played in different environments: {', '.join(sorted(places))}")
    metrics, first = metrics_of(all_of_them), all_of_them[0]

    def numbers(of: Callable[[Evaluated, str], Any], each: Evaluated) -> dict[str, Any]:
        return {"name": each.name, "episodes": len(each.table)} | {name: of(each, name) for name in metrics}

    return {
        "environment": first.facts["environment"],
        "unlike": unlike(all_of_them),
        "confidence": CONFIDENCE,
        "policies": [numbers(lambda x, name: describe_metric(_known(x, name)), each) for each in all_of_them],
        "against": first.name,
        "differences": [
            numbers(lambda x, name: against(_known(first, name), _known(x, name)), each) for each in all_of_them[1:]
        ],
    }


def unlike(all_of_them: Sequence[Evaluated]) -> list[str]:
    """Lists what of the evaluations themselves isn't alike, a line each: it may explain a difference of the policies.

    What a file doesn't say is left out.
    """
    first, lines = all_of_them[0], []
    for other in all_of_them[1:]:
        mine, theirs = ({**each.facts.get("env_settings", {})} for each in (first, other))
        for name in sorted(mine.keys() & theirs.keys()):
            if mine[name] != theirs[name]:
                one, two = _apart(mine[name], theirs[name])
                what = f"env.{name} {json.dumps(one)} ({first.name}), {json.dumps(two)} ({other.name})"
                lines.append(f"other environment settings: {what}; returns may count other rewards")
        ways = [each.facts.get("stochastic") for each in (first, other)]
        if None not in ways and ways[0] != ways[1]:
            said = ["sampled" if way else "most likely" for way in ways]
            lines.append(f"other choice of actions: {said[0]} ({first.name}), {said[1]} ({other.name})")
    return lines


def _apart(one: Any, two: Any) -> tuple[Any, Any]:
    """Of two tables what isn't the same in both; else both."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return one, two
    missing = object()
    keys = [key for key in {**one, **two} if one.get(key, missing) != two.get(key, missing)]
    left, right = ({key: table[key] for key in keys if key in table} for table in (one, two))
    return left, right


def _known(each: Evaluated, metric: str) -> np.ndarray:
    values = each.values(metric)
    assert values is not None, f"{each.name} has no {metric}"
    return values


def in_words(found: dict[str, Any]) -> str:
    """A table of the policies, and a line for each that is compared with the first."""
    metrics = [name for name in METRICS if name in found["policies"][0]]
    width = max(len(each["name"]) for each in found["policies"])
    lines = [f"{found['environment']}: means, and in brackets their {found['confidence']:.0%} intervals"]
    for each in found["policies"]:
        numbers = {m: [f"{each[m][name]:,.2f}" for name in ("mean", "mean_low", "mean_high")] for m in metrics}
        parts = [f"{m} {mean} [{low}, {high}]" for m, (mean, low, high) in numbers.items()]
        lines.append(f"{each['name']:<{width}}  {each['episodes']} episodes  {'  '.join(parts)}")
    metric = "score" if "score" in metrics else "return"
    for each in found["differences"]:
        facts = each[metric]
        d = facts["cohens_d"]
        effect = f"no Cohen's d ({facts['no_cohens_d']})" if d is None else f"Cohen's d {d:+.2f}"
        lines.append(
            f"{each['name']} against {found['against']}: {metric} {facts['difference']:+,.2f} "
            f"[{facts['difference_low']:+,.2f}, {facts['difference_high']:+,.2f}], {effect}, better in "
            f"{facts['probability_of_improvement']:.0%} [{facts['probability_low']:.0%}, "
            f"{facts['probability_high']:.0%}] of pairs of episodes"
        )
    return "\n".join([*lines, *found["unlike"]])


def draw(all_of_them: Sequence[Evaluated], found: dict[str, Any]) -> Any:
    """The figure: each metric's distribution by policy, and the means with their intervals below."""
    from matplotlib.figure import Figure

    metrics = metrics_of(all_of_them)
    figure = Figure(figsize=(4.2 * len(metrics), 5.4), layout="constrained")
    axes = figure.subplots(2, len(metrics), squeeze=False, height_ratios=(3, 1))
    for column, metric in enumerate(metrics):
        edges = edges_of(np.concatenate([_known(each, metric) for each in all_of_them]))
        for place, each in enumerate(all_of_them):
            colour, facts = COLOURS[place % len(COLOURS)], found["policies"][place][metric]
            values = _known(each, metric)
            weights = np.full(len(values), 1 / len(values))
            kind = {"histtype": "stepfilled", "alpha": 0.3, "color": colour, "label": each.name}
            axes[0, column].hist(values, edges, weights=weights, **kind)
            ends = [[facts["mean"] - facts["mean_low"]], [facts["mean_high"] - facts["mean"]]]
            axes[1, column].errorbar([facts["mean"]], [-place], xerr=ends, fmt="o", color=colour, capsize=4)
        axes[0, column].set_title(metric)
        axes[1, column].set_xlabel(f"mean {metric}, {found['confidence']:.0%} interval")
        axes[1, column].set_yticks([-place for place in range(len(all_of_them))], [each.name for each in all_of_them])
        axes[1, column].margins(y=0.4)
    axes[0, 0].set_ylabel("share of episodes")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(found["environment"])
    return figure
