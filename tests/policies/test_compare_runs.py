"""Comparisons of evaluations: effect sizes and intervals by hand and by property."""

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.policies.comparison import (
    COVERED_MEANS,
    against,
    cohens_d,
    comparison,
    describe_metric,
    draw,
    improvement_interval,
    in_words,
    interval,
    probability_of_improvement,
)
from lockstep.policies.evaluated import Evaluated, EvaluatedGroup
from lockstep.policies.results import draw_histogram

samples = st.lists(st.floats(-100, 100), min_size=2, max_size=30).map(np.array)


def evaluated(name, returns, environment="Game-v0", scores=None):
    table = np.zeros((len(returns), 4))
    table[:, 0], table[:, 1] = returns, 10
    table[:, 3] = math.nan if scores is None else scores
    return Evaluated(name, {"environment": environment}, table)


def test_cohens_d_by_hand():
    # means 2 and 5, sums of squares 2 and 8: pooled variance (2 + 8) / (3 + 3 - 2) = 2.5
    assert cohens_d(np.array([1.0, 2, 3]), np.array([3.0, 5, 7])) == pytest.approx(3 / math.sqrt(2.5))
    assert cohens_d(np.array([1.0, 1]), np.array([2.0, 2])) is None
    assert cohens_d(np.array([1.0]), np.array([2.0])) is None


def test_policies_that_play_alike_have_no_effect_and_no_difference_however_often_they_play():
    """A mean of equal numbers is rounded by how many they are."""
    for value, many, few in ((0.955, 100, 20), (0.1, 100, 37), (0.3, 100, 20)):
        for statistic in ("mean", "iqm"):
            found: Any = against(np.full(many, value), np.full(few, value), statistic)
            assert cohens_d(np.full(many, value), np.full(few, value)) is found["cohens_d"] is None
            assert found["no_cohens_d"] == "none differs from the others of its side"
            ends = {name: found[name] for name in ("difference", "difference_low", "difference_high")}
            assert set(ends.values()) == {0.0}, ends
    line = in_words(comparison([evaluated("a", np.full(100, 0.955)), evaluated("b", np.full(20, 0.955))])).split("\n")[
        -1
    ]
    assert line.startswith("b against a: mean return +0.00 [+0.00, +0.00], no Cohen's d (")


SPREAD = np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (SPREAD, SPREAD + 3, None),
        (SPREAD, SPREAD[:9] + 3, "of 9 it would be mostly chance; it takes 10 of each"),
        (np.full(20, 500.0), np.full(20, 22.0), "none differs from the others of its side"),
        (np.full(20, 500.0), 22 + SPREAD, "they hardly vary beside the difference"),  # it is -276
        (SPREAD, SPREAD + 31, "which is over 10 standard deviations"),
        (SPREAD, SPREAD + 30, None),  # 9.9 of them
    ],
)
def test_an_effect_size_that_would_say_nothing_isnt_shown(x, y, why):
    found: Any = against(x, y)
    line = in_words(comparison([evaluated("a", x), evaluated("b", y)])).splitlines()[3]
    if why is None:
        assert found["no_cohens_d"] is None
        assert found["cohens_d"] == cohens_d(x, y)
        assert f", Cohen's d {found['cohens_d']:+.2f}, better in" in line
    else:
        assert found["cohens_d"] is None
        assert why in found["no_cohens_d"]
        assert f", no Cohen's d ({found['no_cohens_d']}), better in" in line


def test_probability_of_improvement_by_hand():
    # of the 6 pairs (1, 2, 2) x (2, 3) four are wins and two ties
    assert probability_of_improvement(np.array([1.0, 2, 2]), np.array([2.0, 3])) == pytest.approx(5 / 6)


@given(x=samples, y=samples)
def test_probability_of_improvement_counts_every_pair(x, y):
    pairs = [1.0 if b > a else 0.5 if b == a else 0.0 for a in x for b in y]
    found = probability_of_improvement(x, y)
    assert found == pytest.approx(np.mean(pairs))
    assert found + probability_of_improvement(y, x) == pytest.approx(1.0)


def test_the_interval_of_a_probability_of_improvement_by_hand():
    # shares of wins: 1/2, 1, 1 of y, with variance 1/12, and 0, 0, 1/3, 1/3 of x, with 1/27
    low, high = improvement_interval(np.array([1.0, 2, 3, 4]), np.array([2.5, 5, 6]))
    odds, half = math.log(5), 1.959964 * math.sqrt(1 / 36 + 1 / 108) / (5 / 6 * 1 / 6)  # of 5/6
    assert [low, high] == pytest.approx([1 / (1 + math.exp(-odds + end)) for end in (half, -half)], rel=1e-6)


def test_samples_that_do_not_overlap_leave_a_doubt_that_falls_with_their_size():
    """However they lie apart: three of each are easily apart by chance."""
    apart = [improvement_interval(np.arange(n) / n, np.arange(n) / n + 2) for n in (2, 3, 5, 10, 100)]
    assert [high for _, high in apart] == [1.0] * 5
    assert [low for low, _ in apart] == pytest.approx([0.386, 0.501, 0.643, 0.800, 0.980], abs=5e-4)
    for (low, _), n in zip(apart, (2, 3, 5, 10, 100), strict=True):  # the score's equation, with (n + n) / 2 - 1
        variance = low * (1 - low) * (1 + (n - 1) * ((1 - low) / (2 - low) + low / (1 + low))) / n**2
        assert 1 - low == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)
    low, high = improvement_interval(np.full(100, 500.0), np.full(100, 500.0))
    assert (low, high) == pytest.approx((0.421, 0.579), abs=5e-4)


@given(x=samples, y=samples)
def test_the_interval_of_a_probability_of_improvement_is_turned_round_with_the_order(x, y):
    low, high = improvement_interval(x, y)
    assert 0 <= low <= probability_of_improvement(x, y) + 1e-12 <= high + 2e-12 <= 1 + 2e-12
    assert low < high
    assert improvement_interval(y, x) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@pytest.mark.parametrize(("count", "other"), [(3, 3), (5, 5), (5, 20), (30, 30)])
def test_the_interval_of_a_probability_of_improvement_holds_it_as_often_as_it_says(count, other):
    """A percentile bootstrap holds 0.92 in 38, 61, 83 and 92 % of these cases, and has no width in up to 62 %."""
    rng = np.random.default_rng(0)
    for shift, spread, truth in ((0.0, 1.0, 0.5), (2.0, 1.0, 0.92135), (1.0, 0.2, 0.83661)):
        held = 0
        for _ in range(400):
            low, high = improvement_interval(rng.normal(size=count), shift + spread * rng.normal(size=other))
            held += low <= truth <= high
        assert held / 400 > 0.88


@given(x=samples, y=samples)
def test_cohens_d_changes_its_sign_with_the_order(x, y):
    one, other = cohens_d(x, y), cohens_d(y, x)
    assert (one is None) == (other is None)
    assert one is None or -one == pytest.approx(other)


def test_an_interval_holds_the_mean_as_often_as_it_says():
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval(np.mean, rng.normal(3.0, 2.0, 60), repetitions=300)
        held += low <= 3.0 <= high
    assert 0.88 < held / 200 < 0.99


def test_equal_samples_do_not_differ_and_shifted_ones_do():
    rng = np.random.default_rng(1)
    x = rng.normal(size=300)
    same: dict[str, Any] = against(x, rng.permutation(x))
    better: dict[str, Any] = against(x, x + 1)
    assert same["difference"] == pytest.approx(0, abs=1e-12)
    assert same["difference_low"] < 0 < same["difference_high"]
    assert same["probability_low"] < 0.5 < same["probability_high"]
    assert better["difference_low"] > 0.5
    assert better["cohens_d"] == pytest.approx(1 / x.std(ddof=1), rel=1e-6)
    assert better["probability_low"] > 0.6


def test_a_metric_in_numbers():
    found: dict[str, Any] = describe_metric(np.array([0.0, 1.0, 2.0, 3.0, 10.0]))
    assert {name: found[name] for name in ("mean", "q25", "median", "q75", "min", "max")} == {
        **{"mean": 3.2, "q25": 1.0, "median": 2.0, "q75": 3.0, "min": 0.0, "max": 10.0},
    }
    assert 0 <= found["mean_low"] < 3.2 < found["mean_high"] <= 10


def test_one_episode_has_no_interval():
    """Which would say that it is known exactly."""
    one, two = evaluated("a", [3.0]), evaluated("b", [4.0])
    found = comparison([one, two, evaluated("c", SPREAD)])
    assert (found["policies"][0]["return"]["mean"], found["policies"][0]["return"]["mean_low"]) == (3.0, None)
    first, second = (each["return"] for each in found["differences"])
    for name in ("difference_low", "difference_high", "probability_low", "probability_high"):
        assert first[name] is second[name] is None
    header, a, _, c, against_a, _ = in_words(found).split("\n")
    assert header.endswith("and in brackets their 95% intervals over episodes")
    assert a.startswith("a  1 episode  return 3.00  length ")
    assert "return 3.00 [" not in c
    assert " [" in c
    assert against_a.startswith("b against a: mean return +1.00, no Cohen's d (")
    assert against_a.endswith("), better in 100% of pairs of episodes")
    header, *lines = in_words(comparison([one, two])).split("\n")
    assert header.endswith("means over the episodes of one policy each")
    assert not any("[" in line for line in lines)


def test_one_episode_is_drawn_without_an_interval():
    pytest.importorskip("matplotlib")
    both = [evaluated("a", [3.0]), evaluated("b", SPREAD)]
    places = [len(axes.collections) for axes in draw(both, comparison(both)).axes[2:]]
    assert places == [1, 1]  # of b alone


def test_names_are_drawn_as_they_are():
    """Not as formulas; and a name that begins with an underscore has its entry in the legend."""
    pytest.importorskip("matplotlib")
    names = [r"a$\frac$c", "_rec"]
    both = [evaluated(name, SPREAD) for name in names]
    figure = draw(both, comparison(both))
    figure.savefig(io.BytesIO())
    legend, ticks = figure.axes[0].get_legend().get_texts(), figure.axes[2].get_yticklabels()
    for texts in (legend, ticks):
        assert [text.get_text().replace(r"\$", "$").strip() for text in texts] == names
    histogram = draw_histogram(r"a$\frac$c: Game-v0", both[0].table)
    histogram.savefig(io.BytesIO())


def test_scores_are_compared_where_all_have_them():
    both = [evaluated("a", [1, 2, 4], scores=[1, 2, 3]), evaluated("b", [3, 4, 5], scores=[4, 4, 5])]
    found = comparison(both)
    assert found["against"] == "a"
    assert found["policies"][1]["score"]["mean"] == pytest.approx(13 / 3)
    assert found["differences"][0]["score"]["difference"] == pytest.approx(7 / 3)
    assert "b against a: mean score +2.33" in in_words(found)
    one = comparison([both[0], evaluated("b", [3, 4, 5])])
    assert "score" not in one["policies"][0]
    assert "b against a: mean return +1.67" in in_words(one)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="1 of them; give two or more"):
        comparison([evaluated("a", [1, 2])])
    with pytest.raises(ValueError, match="different environments: Game-v0, Other-v0"):
        comparison([evaluated("a", [1, 2]), evaluated("b", [1, 2], "Other-v0")])


def test_returns_that_are_no_numbers_are_not_compared():
    with pytest.raises(ValueError, match="compare: a return of b is no finite number"):
        comparison([evaluated("a", [1, 2]), evaluated("b", [3, math.nan])])


def test_other_starts_of_episodes_are_said():
    def started(name, seed):
        plain = evaluated(name, SPREAD)
        return Evaluated(name, plain.facts | ({} if seed is None else {"seed": seed}), plain.table)

    found = comparison([started("a", 0), started("b", 7), started("c", 0), started("d", None)])
    assert found["unlike"] == ["other starts of episodes: seed 0 (a), 7 (b)"]
    assert in_words(found).endswith("seed 0 (a), 7 (b)")


def test_other_lengths_of_training_are_said():
    def trained(name, steps):
        plain = evaluated(name, SPREAD)
        return Evaluated(name, plain.facts | ({} if steps is None else {"global_step": steps}), plain.table)

    many = [trained(name, steps) for name, steps in (("a", 20224), ("b", 5120), ("c", 20224), ("d", 0), ("e", None))]
    found = comparison(many)
    assert found["unlike"] == ["other lengths of training: 20,224 steps (a), 5,120 (b)"]
    assert in_words(found).endswith("20,224 steps (a), 5,120 (b)")
    assert comparison([many[3], many[0]])["unlike"] == comparison([many[4], many[0]])["unlike"] == []


def test_episodes_that_are_cut_elsewhere_are_said():
    plain = evaluated("a", SPREAD)
    long, short = (Evaluated(name, plain.facts | {"max_steps": n}, plain.table) for name, n in (("a", 10000), ("b", 5)))
    assert comparison([long, short])["unlike"] == ["episodes are cut after 10,000 steps (a), 5 (b)"]
    assert comparison([long, plain, long])["unlike"] == []


def test_an_environment_that_both_engines_have_by_two_names_is_pointed_out():
    with pytest.raises(ValueError, match=r"Game-v0, lockstep/Game-v0; --env\.backend gymnasium trains with engine jax"):
        comparison([evaluated("a", [1, 2]), evaluated("b", [1, 2], "lockstep/Game-v0")])


# ---- groups of seeds


def group(name, *runs):
    tables = [evaluated("", returns).table for returns in runs]
    return EvaluatedGroup(name, {"environment": "Game-v0"}, tables[0], tables)


def test_groups_are_compared_by_their_runs():
    a = group("a", [0.0, 2.0], [3.0], [5.0, 5.0], [100.0])  # means 1, 3, 5, 100
    b = group("b", [4.0], [6.0], [50.0], [-9.0])
    found = comparison([a, b])
    first, second = (each["return"] for each in found["policies"])
    assert (found["over"], found["policies"][0]["runs"]) == ("runs", 4)
    assert (first["iqm"], second["iqm"]) == (4.0, 5.0)  # the lowest and the highest of four are left out
    assert first["iqm_low"] < 4.0 < first["iqm_high"]
    difference = found["differences"][0]["return"]
    assert difference["difference"] == 1.0
    assert difference["probability_of_improvement"] == probability_of_improvement(
        np.array([1.0, 3, 5, 100]), np.array([4.0, 6, 50, -9])
    )
    text = in_words(found)
    assert "interquartile means over runs, and in brackets their 95% intervals over runs" in text
    assert "a  4 runs  return 4.00 [" in text
    assert "b against a: interquartile mean return +1.00 [" in text
    assert text.split("\n")[3].endswith("of pairs of runs")


def test_what_intervals_of_few_runs_or_episodes_hold_is_said():
    few = comparison([group("a", [1.0], [2.0], [3.0]), group("b", *[[float(n)] for n in range(8)])])
    line = "of 3 runs (a), 95% intervals hold the interquartile mean in about 75% of cases"
    assert few["few"] == [line]
    assert line in in_words(few).split("\n")
    five = evaluated("c", SPREAD[:5])
    said = "of 5 episodes (c), 95% intervals hold the mean in about 84% of cases"
    assert comparison([five, five])["few"] == comparison([evaluated("d", SPREAD), five])["few"] == [said]
    both = comparison([five, evaluated("d", SPREAD[:3]), evaluated("e", SPREAD[:5])])["few"]
    assert [line.partition(",")[0] for line in both] == ["of 3 episodes (d)", "of 5 episodes (c"]
    assert comparison([evaluated("d", SPREAD), evaluated("e", [1.0])])["few"] == []  # which has no interval


@pytest.mark.parametrize("count", COVERED_MEANS)
def test_the_intervals_of_few_values_hold_their_mean_as_often_as_is_said(count):
    rng = np.random.default_rng(count)
    drawn = rng.normal(size=(1200, 1, count))
    means = np.take_along_axis(drawn, rng.integers(count, size=(1200, 400, count)), 2).mean(2)
    low, high = np.percentile(means, (2.5, 97.5), axis=1)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(COVERED_MEANS[count], abs=0.035)


def test_intervals_over_episodes_are_called_that():
    text = in_words(comparison([evaluated("a", SPREAD), evaluated("b", SPREAD)]))
    assert "means over the episodes of one policy each, and in brackets their 95% intervals over episodes" in text


def test_a_group_and_a_policy_are_not_compared():
    with pytest.raises(ValueError, match=r"^compare: a is one policy, b a group of 2 runs; runs are "):
        comparison([evaluated("a", SPREAD), group("b", SPREAD, SPREAD)])


def test_seeds_that_were_trained_for_other_lengths_than_their_group_are_named():
    """A seed that failed plays with the policy that it had then."""

    def trained(name, *steps):
        plain = group(name, *[SPREAD] * len(steps))
        seeds = {f"seed_{n}": step for n, step in enumerate(steps) if step is not None}
        return EvaluatedGroup(name, plain.facts | {"global_step": steps[0]}, plain.table, plain.tables, seeds)

    whole, broken, short = trained("a", 1536, 1536), trained("b", 512, 1536, 1536, 768), trained("c", 512, 512, None)
    inside = "other lengths of training in b: 1,536 steps (seed_1, seed_2), 768 (seed_3), 512 (seed_0)"
    assert comparison([whole, broken])["unlike"] == comparison([broken, whole])["unlike"] == [inside]
    between = "other lengths of training: 1,536 steps (a), 512 (c)"
    assert comparison([whole, short])["unlike"] == [between]
    assert comparison([whole, whole])["unlike"] == []
    assert in_words(comparison([broken, short])).endswith(f"{inside}\n{between.replace('(a)', '(b)')}")
