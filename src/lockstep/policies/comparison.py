"""Compares policies by the episodes of their evaluations, and groups of seeds by their runs.

Intervals over episodes describe one policy and say nothing of another seed's policy; intervals over runs are what a
method is judged by (Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from lockstep.core.shards import keyed_generator
from lockstep.policies.evaluated import Evaluated, unlike
from lockstep.policies.results import edges_of
from lockstep.runs.curves import CONFIDENCE, COVERED, REPETITIONS, interquartile_mean, without_latex
from lockstep.runs.shown.labels import add_legend, in_a_picture, shortened, write_out
from lockstep.runs.shown.numerals import format_share, spec_of

ERRORS = NormalDist().inv_cdf(0.5 + 0.5 * CONFIDENCE)
"""Standard errors on each side of the estimate that such an interval of a normal one has."""
HALVINGS = 60
COLOURS = ("#1f5fa8", "#d9822b", "#2f7f5f", "#c0392b", "#7a5195", "#8a8a8a")
HATCHES = (None, "//", "..", "xx")
"""Of bars; the next one begins when colours begin again."""
NAMES = {"mean": "mean", "iqm": "interquartile mean"}
METRICS = ("return", "score", "length")
COVERED_MEANS = {2: 0.5, 3: 0.74, 4: 0.8, 5: 0.84, 6: 0.86, 7: 0.88, 8: 0.88, 9: 0.89}
"""How often :func:`interval` of so few normal values holds their mean, by simulation; skewed ones have 0.05 less."""
LEAST_EPISODES, LARGEST_EFFECT = 10, 10.0
"""Cohen's d needs this many episodes on each side: with fewer it is mostly chance, and over 4 % too large. It is also
not shown beyond this many standard deviations: episodes hardly vary then, and it measures that, not the difference.
"""


def interval(
    statistic: Callable[..., float], *samples: np.ndarray, repetitions: int = REPETITIONS, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval (Efron 1979) of a statistic of independent samples ``[n]``.

    The samples may differ in length.
    """
    generator = keyed_generator(seed, "bootstrap")
    found = [statistic(*(x[generator.integers(len(x), size=len(x))] for x in samples)) for _ in range(repetitions)]
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(found, (tail, 100.0 - tail))
    return float(low), float(high)


def _ends(statistic: Callable[..., float], *samples: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """Returns :func:`interval`; None if a sample has a single value, which says nothing of the spread."""
    return interval(statistic, *samples) if min(map(len, samples)) > 1 else (None, None)


def cohens_d(x: np.ndarray, y: np.ndarray) -> float | None:
    """Returns the difference of means ``y - x`` over the pooled standard deviation (Cohen 1988).

    The pooled variance is ``((n_x - 1) s_x² + (n_y - 1) s_y²) / (n_x + n_y - 2)``. None if nothing varies.
    """
    freedom = len(x) + len(y) - 2
    if freedom < 1 or np.ptp(x) == np.ptp(y) == 0:  # the mean of equal numbers is rounded, so their squares aren't 0
        return None
    squares = np.square(x - x.mean()).sum() + np.square(y - y.mean()).sum()
    return float((y.mean() - x.mean()) / np.sqrt(squares / freedom)) if squares > 0 else None


def effect_size(x: np.ndarray, y: np.ndarray) -> tuple[float | None, str | None]:
    """Returns :func:`cohens_d` if it is meaningful, else None with the reason."""
    fewest = min(len(x), len(y))
    if fewest < LEAST_EPISODES:
        return None, f"of {fewest} it would be mostly chance; it takes {LEAST_EPISODES} of each"
    d = cohens_d(x, y)
    if d is None:
        return None, "none differs from the others of its side"
    if abs(d) > LARGEST_EFFECT:
        return None, f"they hardly vary beside the difference, which is over {LARGEST_EFFECT:g} standard deviations"
    return d, None


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """Estimates the probability that an episode (a run) of ``y`` beats one of ``x``; a tie counts half.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4.3: the
    Mann-Whitney U statistic over ``n_x n_y``.
    """
    return float(_twice_beaten(x, y).sum() / (2 * len(x) * len(y)))


def _twice_beaten(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns twice the number of values of ``x`` that each of ``y`` beats, int64 ``[n_y]``; a tie counts half."""
    ordered = np.sort(x)
    return np.searchsorted(ordered, y, "left") + np.searchsorted(ordered, y, "right")


def improvement_interval(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns the interval of :func:`probability_of_improvement`, of at least two values on each side.

    It is symmetric on the scale of log-odds, by the variance of DeLong et al. 1988: for each side that of the values'
    own shares of wins, over their number. Where nothing varies, as between samples that don't overlap, it is
    :func:`_score_interval` (Perme and Manevski 2019, "Confidence intervals for the Mann-Whitney test"). A percentile
    bootstrap has no width there: with 5 on each side it holds a probability of 0.92 in 6 of 10 cases, this in 9 of 10.
    """
    share = probability_of_improvement(x, y)
    shares = _twice_beaten(x, y) / (2 * len(x)), _twice_beaten(y, x) / (2 * len(y))
    variance = sum(float(np.var(each, ddof=1)) / len(each) for each in shares)
    if variance == 0.0:
        return _score_interval(share, len(x), len(y))
    half, odds = ERRORS * math.sqrt(variance) / (share * (1.0 - share)), (1.0 - share) / share
    return 1.0 / (1.0 + odds * math.exp(half)), 1.0 / (1.0 + odds * math.exp(-half))


def _score_interval(share: float, count: int, other: int) -> tuple[float, float]:
    """Returns the interval of a probability of improvement by the numbers of values alone.

    Newcombe 2006, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2", method
    5: the probabilities ``p`` at most so many standard errors away, whose square is ``p (1 - p) (1 + n ((1 - p) /
    (2 - p) + p / (1 + p))) / (count other)``, with ``n = (count + other) / 2 - 1``.
    """
    more = (count + other) / 2 - 1

    def is_within(p: float) -> bool:
        squared = p * (1.0 - p) * (1.0 + more * ((1.0 - p) / (2.0 - p) + p / (1.0 + p))) / (count * other)
        return abs(p - share) <= ERRORS * math.sqrt(squared)

    def end(outside: float) -> float:
        inside = share
        for _ in range(HALVINGS if outside != share else 0):
            middle = 0.5 * (inside + outside)
            inside, outside = (middle, outside) if is_within(middle) else (inside, middle)
        return inside

    return end(0.0), end(1.0)


def describe_metric(values: np.ndarray) -> dict[str, float | None]:
    """Returns mean and interquartile mean with their intervals, standard deviation, quartiles and range of ``[n]``.

    The ends of intervals are None if there is a single value.
    """
    low, high = _ends(lambda x: float(x.mean()), values)
    middle = _ends(lambda x: float(interquartile_mean(x)), values)
    quartiles = dict(zip(("q25", "median", "q75"), np.percentile(values, (25, 50, 75)).tolist(), strict=True))
    facts: dict[str, float | None] = {
        "mean": float(values.mean()),
        "mean_low": low,
        "mean_high": high,
        "std": float(values.std()),
    }
    facts |= {"iqm": float(interquartile_mean(values)), "iqm_low": middle[0], "iqm_high": middle[1]}
    return facts | quartiles | {"min": float(values.min()), "max": float(values.max())}


def against(x: np.ndarray, y: np.ndarray, statistic: str = "mean") -> dict[str, float | str | None]:
    """Measures by how much ``y`` exceeds ``x``: difference, probability of improvement, their intervals, and Cohen's d.

    ``statistic`` is what the difference is taken of: ``mean`` or ``iqm``, the interquartile mean. The ends of intervals
    are None if either side has a single value.
    """
    d, why_none = effect_size(x, y)
    average = np.mean if statistic == "mean" else interquartile_mean

    def difference(x: np.ndarray, y: np.ndarray) -> float:
        if np.ptp(x) == np.ptp(y) == 0:  # a mean of equal numbers is rounded by how many they are
            return float(y[0] - x[0])
        return float(average(y) - average(x))

    low, high = _ends(difference, x, y)
    better = improvement_interval(x, y) if min(len(x), len(y)) > 1 else (None, None)
    return {
        "difference": difference(x, y),
        "difference_low": low,
        "difference_high": high,
        "cohens_d": d,
        "no_cohens_d": why_none,
        "probability_of_improvement": probability_of_improvement(x, y),
        "probability_low": better[0],
        "probability_high": better[1],
    }


def metrics_of(all_of_them: Sequence[Evaluated]) -> list[str]:
    """Returns the metrics that every episode of every policy has."""
    return [name for name in METRICS if all(each.values(name) is not None for each in all_of_them)]


def comparison(all_of_them: Sequence[Evaluated]) -> dict[str, Any]:
    """Returns each policy in numbers, and all others against the first, as JSON.

    Raises:
        ValueError: there are less than two, they played different environments, groups are mixed with single policies,
            or a return isn't finite; one line.
    """
    if len(all_of_them) < 2:
        raise ValueError(f"compare: {len(all_of_them)} of them; give two or more runs or evaluations")
    places = {each.facts["environment"] for each in all_of_them}
    if len(places) > 1:
        twins = any(f"lockstep/{place}" in places for place in places)
        hint = "; --env.backend gymnasium trains with engine jax in Gymnasium's too" if twins else ""
        raise ValueError(f"compare: these played in different environments: {', '.join(sorted(places))}{hint}")
    for each in all_of_them:
        if each.values("return") is None:
            raise ValueError(f"compare: a return of {each.name} is no finite number")
    metrics, first = metrics_of(all_of_them), all_of_them[0]
    for other in all_of_them[1:]:
        if other.unit != first.unit:
            raise ValueError(
                f"compare: {first.name} is {_what(first)}, {other.name} {_what(other)}; runs are compared with runs, "
                "episodes with episodes"
            )

    def numbers(of: Callable[[Evaluated, str], Any], each: Evaluated) -> dict[str, Any]:
        return {"name": each.name, f"{each.unit}s": each.count} | {name: of(each, name) for name in metrics}

    return {
        "over": f"{first.unit}s",
        "statistic": first.statistic,
        "environment": first.facts["environment"],
        "unlike": unlike(all_of_them),
        "few": _too_few(all_of_them),
        "confidence": CONFIDENCE,
        "policies": [numbers(lambda x, name: describe_metric(_known(x, name)), each) for each in all_of_them],
        "against": first.name,
        "differences": [
            numbers(lambda x, name: against(_known(first, name), _known(x, name), x.statistic), each)
            for each in all_of_them[1:]
        ],
    }


def _too_few(all_of_them: Sequence[Evaluated]) -> list[str]:
    """Returns a line for each number of episodes or runs that is so small that intervals are narrower than they say."""
    first, names = all_of_them[0], {}
    for each in all_of_them:
        names.setdefault(each.count, dict[str, None]())[each.name] = None
    covered = COVERED if first.unit == "run" else COVERED_MEANS
    return [
        f"of {count} {first.unit}s ({', '.join(of)}), {CONFIDENCE:.0%} intervals hold the {NAMES[first.statistic]} in "
        f"about {covered[count]:.0%} of cases"
        for count, of in sorted(names.items())
        if count in covered
    ]


def _what(each: Evaluated) -> str:
    return f"a group of {each.count} runs" if each.unit == "run" else "one policy"


def _known(each: Evaluated, metric: str) -> np.ndarray:
    values = each.values(metric)
    assert values is not None, f"{each.name} has no {metric}"
    return values


def in_words(found: dict[str, Any]) -> str:
    """Returns a table of the policies, and a line for each that is compared with the first."""
    metrics = [name for name in METRICS if name in found["policies"][0]]
    width = max(cell_len(each["name"]) for each in found["policies"])
    over, statistic = found["over"], found["statistic"]
    of_what = "interquartile means over runs" if over == "runs" else "means over the episodes of one policy each"
    brackets = f", and in brackets their {found['confidence']:.0%} intervals over {over}"
    lines = [f"{found['environment']}: {of_what}{brackets if any(p[over] > 1 for p in found['policies']) else ''}"]
    names = (statistic, f"{statistic}_low", f"{statistic}_high")
    for each in found["policies"]:
        parts = [f"{m} {_in_brackets('', *(each[m][name] for name in names))}" for m in metrics]
        count = f"{each[over]} {over if each[over] > 1 else over[:-1]}"
        lines.append("  ".join([set_cell_size(each["name"], width), count, *parts]))
    metric = "score" if "score" in metrics else "return"
    for each in found["differences"]:
        facts = each[metric]
        d = facts["cohens_d"]
        effect = f"no Cohen's d ({facts['no_cohens_d']})" if d is None else f"Cohen's d {d:+.2f}"
        change = _in_brackets("+", *(facts[f"difference{end}"] for end in ("", "_low", "_high")))
        share = _in_brackets(
            format_share, *(facts[f"probability{end}"] for end in ("_of_improvement", "_low", "_high"))
        )
        lines.append(
            f"{each['name']} against {found['against']}: {NAMES[statistic]} {metric} {change}, {effect}, better in "
            f"{share} of pairs of {over}"
        )
    return "\n".join([*lines, *found["few"], *found["unlike"]])


def _in_brackets(form: str | Callable[[float], str], value: float, low: float | None, high: float | None) -> str:
    """Formats a number by a sign's format or a function, with the ends of its interval in brackets if it has one."""
    spec = spec_of(value, *(end for end in (low, high) if end is not None))
    said = (lambda x: format(x, form + spec)) if isinstance(form, str) else form
    return said(value) if low is None or high is None else f"{said(value)} [{said(low)}, {said(high)}]"


@without_latex()
def draw(all_of_them: Sequence[Evaluated], found: dict[str, Any]) -> Any:
    """Draws each metric's distribution by policy or group, with the means and intervals below; returns the figure."""
    from matplotlib.figure import Figure

    name = found["statistic"]
    metrics = metrics_of(all_of_them)
    below = max(1.35, 0.3 * len(all_of_them))  # inches for the middles
    figure = Figure(figsize=(4.2 * len(metrics), 4.05 + below), layout="constrained")
    axes = figure.subplots(2, len(metrics), squeeze=False, height_ratios=(4.05, below))
    names = [in_a_picture(each.name) for each in all_of_them]
    for column, metric in enumerate(metrics):
        edges = edges_of(np.concatenate([_known(each, metric) for each in all_of_them]))
        for place, each in enumerate(all_of_them):
            colour, facts = COLOURS[place % len(COLOURS)], found["policies"][place][metric]
            values = _known(each, metric)
            weights = np.full(len(values), 1 / len(values))
            kind = {"histtype": "stepfilled", "alpha": 0.3, "color": colour, "label": "" if column else names[place]}
            hatch = HATCHES[place // len(COLOURS) % len(HATCHES)]
            axes[0, column].hist(values, edges, weights=weights, hatch=hatch, **kind)
            middle, low, high = facts[name], facts[f"{name}_low"], facts[f"{name}_high"]
            ends = None if low is None else [[middle - low], [high - middle]]
            axes[1, column].errorbar([middle], [-place], xerr=ends, fmt="o", color=colour, capsize=4)
        axes[0, column].set_title(metric)
        axes[1, column].set_xlabel(f"{NAMES[name]} {metric}, {found['confidence']:.0%} interval over {found['over']}")
        shown = ["" if column else shortened(each.name) for each in all_of_them]
        axes[1, column].set_yticks([-place for place in range(len(names))], shown)
        axes[1, column].margins(y=0.8 / len(names))
        for axis in axes[:, column]:
            write_out(axis.xaxis)
    axes[0, 0].set_ylabel(f"share of {found['over']}")
    add_legend(figure, names)
    figure.suptitle(in_a_picture(found["environment"]))
    return figure
