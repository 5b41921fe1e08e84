"""Learning curves over seeds: interquartile mean and bootstrap band, against numbers by hand."""

import contextlib
import csv
import itertools
import json

import numpy as np
import pytest
from made_runs import make_run, summary_of

from lockstep.runs import curves
from lockstep.runs.curves import (
    COVERED,
    METRIC,
    MOST_POINTS,
    bootstrap_interval,
    curve_of,
    draw_curves,
    interquartile_mean,
    what_few_cover,
    write_curves,
)
from lockstep.runs.directory import RunDirectory
from lockstep.runs.groups import finish_group
from lockstep.runs.trackers import jsonl


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 100], 2.5),  # without 1 and 100
        ([100, 1, 3, 2], 2.5),
        ([0, 1, 2, 3, 4, 5, 6, 90], 3.5),  # without 0, 1 and 6, 90
        ([1, 2, 6], 3.0),  # a quarter of three, rounded down, is none
        ([7], 7.0),
        ([0, 1, 2, 3, 14], 2.0),  # a quarter of five is one
    ],
)
def test_the_interquartile_mean_by_hand(values, expected):
    assert interquartile_mean(np.array(values, float)) == expected
    assert interquartile_mean(np.array([values, values], float)).tolist() == [expected] * 2


def all_samples(values, confidence):
    """The interval over every bootstrap sample there is, each as likely as any other."""
    means = interquartile_mean(np.array(list(itertools.product(values, repeat=len(values)))))
    tail = (1 - confidence) / 2
    return np.quantile(means, [tail, 1 - tail])


def test_the_interval_is_that_of_all_bootstrap_samples():
    values = [0.0, 1.0, 2.2, 3.1, 6.7, 10.0]
    low, high = bootstrap_interval(np.array([values, [x + 5 for x in values]]), 0.9, 20_000)
    expected = all_samples(values, 0.9)
    assert low[0] == pytest.approx(expected[0], abs=0.3)
    assert high[0] == pytest.approx(expected[1], abs=0.3)
    assert [low[1], high[1]] == pytest.approx([low[0] + 5, high[0] + 5])
    narrow = bootstrap_interval(np.array([values]), 0.5, 20_000)
    assert low[0] < narrow[0][0] <= narrow[1][0] < high[0]


def test_equal_seeds_leave_no_doubt_and_different_ones_do():
    low, high = bootstrap_interval(np.array([[3.0] * 6, [1.0, 2, 3, 4, 5, 6]]))
    assert (low[0], high[0]) == (3.0, 3.0)
    assert low[1] < 3.5 < high[1]


def test_seeds_meet_at_iterations_whatever_rows_are_missing():
    def records(iterations, scale):
        return [{"iteration": n, "global_step": 8 * n, METRIC: scale * n} for n in iterations]

    curve = curve_of([records([1, 2, 3, 4], 1.0), records([1, 3, 4, 5], 10.0)])
    assert (curve.iterations, curve.global_steps) == ([1, 3, 4], [8, 24, 32])
    assert curve.returns.tolist() == [[1.0, 10.0], [3.0, 30.0], [4.0, 40.0]]


def test_the_band_holds_the_truth_as_often_as_it_says():
    """Of samples of 20 normal seeds the interquartile mean is 0; about 95 % of the bands hold it."""
    drawn = np.random.default_rng(0).normal(size=(300, 20))
    low, high = bootstrap_interval(drawn, repetitions=400)
    held = ((low <= 0) & (high >= 0)).mean()
    assert 0.88 < held < 0.99
    wrong = ((low <= 1) & (high >= 1)).mean()
    assert wrong < 0.2


def records(returns):
    return [{"iteration": n, "global_step": 10 * n, METRIC: value} for n, value in enumerate(returns, 1)]


def test_a_curve_begins_where_every_seed_has_finished_an_episode():
    curve = curve_of([records([None, 1.0, 2.0, 3.0]), records([0.5, None, 4.0, float("nan")])])
    assert curve.iterations == [3]
    assert curve.global_steps == [30]
    assert curve.returns.tolist() == [[2.0, 4.0]]
    assert curve.iqm.tolist() == [3.0]
    assert [end.tolist() for end in curve.band or ()] == [[2.0], [4.0]]
    none = curve_of([records([None]), records([1.0])])
    assert none.iterations == []
    assert [end.shape for end in (none.iqm, *(none.band or ()))] == [(0,)] * 3


@pytest.mark.parametrize("seeds", COVERED)
def test_the_band_of_few_seeds_holds_the_truth_as_often_as_is_said(seeds):
    """Of 20 it is about 95 %."""
    drawn = np.random.default_rng(seeds).normal(size=(1200, seeds))
    low, high = bootstrap_interval(drawn, repetitions=600)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(COVERED[seeds], abs=0.035)
    assert what_few_cover(seeds) == f" (with {seeds} seeds it covers about {100 * COVERED[seeds]:.0f} %)"
    assert what_few_cover(8) == what_few_cover(1) == ""


def test_one_seed_has_no_interval(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records([1.0, 2.0])))
    curve = write_curves(tmp_path, {3: tmp_path})
    assert curve.band is None
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [(row["iqm"], row["low"], row["high"], row["seed_3"]) for row in rows] == [
        ("1.0", "", "", "1.0"),
        ("2.0", "", "", "2.0"),
    ]
    points = json.loads((tmp_path / "curves.json").read_text())["points"]
    assert [(point["iqm"], point["low"], point["high"]) for point in points] == [(1.0, None, None), (2.0, None, None)]


@pytest.mark.parametrize(("count", "called"), [(1, "the only seed"), (5, "seed_3 (1 of 5 seeds)")])
def test_the_picture_of_one_seed_says_of_how_many_it_is_one(tmp_path, monkeypatch, count, called):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []

    def save(figure, path, **_):
        drawn.append(figure)
        path.touch()

    monkeypatch.setattr(figure, "savefig", save)
    facts = summary_of(seed=3, environment="CartPole-v1", iteration=40, episodes=9, best_checkpoint=None)
    run = make_run(tmp_path / "seed_3", facts)
    finish_group(RunDirectory(tmp_path), {run: facts}, count, 1.0, lambda line: None)
    (axis,) = drawn[0].axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [called]


def test_long_runs_are_thinned_to_their_ends():
    curve = curve_of([records(np.arange(2000.0).tolist())] * 2)
    assert len(curve.iterations) == MOST_POINTS
    assert (curve.iterations[0], curve.iterations[-1]) == (1, 2000)
    assert np.diff(curve.iterations).max() <= 5


@pytest.mark.parametrize("most", [2, 10, 11, 200, 1999, 2000])
def test_long_runs_keep_their_peaks_where_they_are_asked_for(most):
    values = np.arange(2000.0)
    values[[333, 1502]] = 5000.0, -5000.0
    rows = [records(values.tolist()), records((values + 4).tolist())]
    curve = curve_of(rows, most=most, peaks=True)
    assert len(curve.iterations) <= most
    assert curve.iterations == sorted(set(curve.iterations))
    assert (curve.iterations[0], curve.iterations[-1]) == (1, 2000)
    if most > 2:
        assert {334, 1503} < set(curve.iterations)
        assert (curve.iqm.max(), curve.iqm.min()) == (5002.0, -4998.0)
    assert (len(curve.iterations) == 2000) == (most == 2000)


def test_what_is_written_is_the_curve(tmp_path):
    pytest.importorskip("matplotlib")
    seeds = {}
    for seed, returns in ((3, [1.0, 2.0]), (4, [3.0, 8.0])):
        seeds[seed] = tmp_path / f"seed_{seed}"
        seeds[seed].mkdir()
        (seeds[seed] / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(returns)))
    draw_curves(tmp_path, "two seeds", write_curves(tmp_path, seeds), "seed_3")
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [(row["iteration"], row["global_step"], row["iqm"]) for row in rows] == [
        ("1", "10", "2.0"),
        ("2", "20", "5.0"),
    ]
    assert [(row["seed_3"], row["seed_4"]) for row in rows] == [("1.0", "3.0"), ("2.0", "8.0")]
    found = json.loads((tmp_path / "curves.json").read_text())
    assert (found["confidence"], found["seeds"]) == (0.95, [3, 4])
    assert found["interval"] == "percentile bootstrap over seeds"
    assert [{k: str(v) for k, v in point.items()} for point in found["points"]] == rows
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_who_reads_curves_while_they_are_written_again_sees_them_whole(tmp_path):
    pytest.importorskip("matplotlib")
    seeds, names = {3: tmp_path / "seed_3"}, ("curves.csv", "curves.json", "curves.png")
    seeds[3].mkdir()
    with contextlib.ExitStack() as stack:
        read, written = [], []
        for returns in ([1.0, 2.0], [1.0, 2.0, 8.0]):
            (seeds[3] / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(returns)))
            draw_curves(tmp_path, "one seed", write_curves(tmp_path, seeds), "seed_3")
            written.append([(tmp_path / name).read_bytes() for name in names])
            read = read or [stack.enter_context((tmp_path / name).open("rb")) for name in names]
        assert [file.read() for file in read] == written[0]
    assert not any(one == other for one, other in zip(*written, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "seed_3"]


def test_of_the_rows_of_all_seeds_no_more_is_held_than_a_curve_needs(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(curves, "curve_of", lambda records: given.extend(records) or curve_of(records))
    rows = [{**record, "train/approx_kl": 0.1} for record in [*records([1.0, 2.0]), *records([None])]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_curves(tmp_path, {0: tmp_path})
    assert [list(row) for row in given[0]] == [["iteration", "global_step", METRIC]] * 2 + [
        ["iteration", "global_step"]
    ]
    first, second, _ = jsonl.read_jsonl(tmp_path / "metrics.jsonl")
    assert first["train/approx_kl"] == 0.1
    assert all(a is b for a, b in zip(first, second, strict=True))  # names are held once


def test_a_row_that_is_being_written_is_left_out_and_a_damaged_one_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2, "glo')
    assert jsonl.read_jsonl(file) == [{"iteration": 1}]
    file.write_text('{"iteration": 1, "glo\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 is no metrics record"):
        jsonl.read_jsonl(file)


def test_a_last_row_of_which_the_rest_comes_meanwhile_is_left_out(tmp_path, monkeypatch):
    """A run that trains writes rows while they are read: half a row is no damaged one."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2, "glo')
    parsed = jsonl._record

    def while_it_grows(line):
        if not line.endswith(b"\n"):
            with file.open("a") as more:
                more.write('bal_step": 8}\n')
        return parsed(line)

    monkeypatch.setattr(jsonl, "_record", while_it_grows)
    assert jsonl.read_jsonl(file) == [{"iteration": 1}]
    assert len(jsonl.read_jsonl(file)) == 2


def test_a_curve_of_rows_that_say_no_step_is_refused_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "global_step": null}\n{"iteration": 2, "global_step": 8}\n'
    )
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 is no metrics record"):
        write_curves(tmp_path, {0: tmp_path})
