"""``metrics.csv`` as pandas reads it."""

import math

import pytest

from lockstep.runs.trackers import RunTrackers, cut_trackers

pandas = pytest.importorskip("pandas")


def record(iteration, **more):
    return {"iteration": iteration, "global_step": 100 * iteration, "train/loss": 1 / (iteration + 2), **more}


def log(path, iterations, more):
    trackers = RunTrackers(path, names=())
    for iteration in iterations:
        trackers.log(record(iteration, **more(iteration)))
    trackers.close()


def evaluated(iteration):
    return {"eval/return_mean": 10.0 * iteration} if iteration % 3 == 0 else {}


def test_a_table_of_numbers_with_every_digit(tmp_path):
    log(tmp_path, range(1, 5), lambda i: {"rollout/episode_return_mean": None if i < 3 else math.pi})
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert list(table.columns) == ["iteration", "global_step", "train/loss", "rollout/episode_return_mean"]
    assert table["global_step"].tolist() == [100, 200, 300, 400]
    assert table["iteration"].dtype == table["global_step"].dtype == "int64"
    assert table["train/loss"].tolist() == [1 / 3, 1 / 4, 1 / 5, 1 / 6]
    assert table["rollout/episode_return_mean"].dtype == "float64"
    assert table["rollout/episode_return_mean"].dropna().tolist() == [math.pi, math.pi]


def test_columns_that_appear_late_and_a_resume(tmp_path):
    log(tmp_path, range(1, 9), evaluated)
    cut_trackers(tmp_path, last_iteration=5, last_global_step=500)
    log(tmp_path, range(6, 11), lambda i: evaluated(i) | ({"eval/length_mean": 7.0} if i == 9 else {}))
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert table["iteration"].tolist() == list(range(1, 11))
    assert table.set_index("iteration")["eval/return_mean"].dropna().to_dict() == {3: 30.0, 6: 60.0, 9: 90.0}
    assert table["eval/length_mean"].count() == 1
    jsonl = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    pandas.testing.assert_frame_equal(jsonl[table.columns], table, check_dtype=False)


def test_a_row_of_another_width_would_be_noticed(tmp_path):
    log(tmp_path, range(1, 3), lambda _: {})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,300,0.2,9.0\n")
    with pytest.raises(pandas.errors.ParserError):
        pandas.read_csv(tmp_path / "metrics.csv")
