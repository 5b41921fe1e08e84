import pytest

from benchmarks.cases import ARRAY_CARTPOLE, T1
from benchmarks.comparison import Row, best, mean_times, ratio, ratios
from benchmarks.programs import CLEANRL, ours, programs_of
from benchmarks.steady_rate import Measured


def test_median_not_mean(row):
    assert row(10.0, 11.0, 1000.0).median == 11.0


def test_a_failed_repetition_leaves_no_figure(row):
    assert row(10.0, 11.0, failures=["killed"]).median is None


def test_best_passes_over_rows_without_a_figure(row):
    slow, fast, broken = row(10.0), row(20.0), row(99.0, failures=["exit status 1"])
    assert best([slow, broken, fast]) is fast
    assert best([broken]) is None


def test_a_ratio_needs_two_figures(row):
    assert ratio(row(30.0), row(10.0)) == pytest.approx(3.0)
    assert ratio(row(30.0), None) is None
    assert ratio(row(30.0, failures=["killed"]), row(10.0)) is None


def test_ratios_are_of_repetitions_and_their_median_counts(row):
    mine, base = row(30.0, 20.0, 44.0), row(10.0, 20.0, 11.0)  # the machine was slower, or busy, in the second
    assert ratios(mine, base) == pytest.approx([3.0, 1.0, 4.0])
    assert ratio(mine, base) == pytest.approx(3.0)  # of the medians it would be 30 / 11
    assert ratios(mine, row(10.0, 20.0, failures=["killed"])) == []
    with pytest.raises(ValueError, match="shorter"):
        ratios(mine, row(10.0))


def test_cores_at_work_are_of_the_steady_state(row):
    made = row(1000.0, 2000.0, 3000.0)
    assert made.busy is None
    made.cpu = [800.0, 100.0, 900.0]
    assert made.busy == pytest.approx(1.6)


def test_rows_know_who_steps_all_environments_at_once():
    rows = [Row.of(program) for program in programs_of(T1)]
    batched = [row.label for row in rows if row.batched]
    assert batched == ["skrl, Gymnasium's vector entry point", "SBX (JAX), EnvPool", f"{CLEANRL}, EnvPool"]


def test_hidden_time_shows():
    records = [{f"time/{name}": 0.1 for name in ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")}] * 5
    records = [record | {"time/t_iter": 0.5} for record in records]
    assert mean_times(Measured(1.0, 1.0, wall=2.0, records=records))["accounted"] == pytest.approx(1.0)
    assert mean_times(Measured(1.0, 1.0, wall=4.0, records=records))["accounted"] == pytest.approx(0.5)


def test_a_row_takes_in_repetitions():
    made = Row.of(ours(T1, ARRAY_CARTPOLE, "exact"))
    made.add(Measured(5.0, 1.0, 1.0, cpu=20.0, memory=300))
    made.add(Measured(7.0, 1.2, 1.0))
    assert (made.median, made.cores, made.times) == (6.0, [1.0, 1.2], [])
    assert (made.cpu, made.memory) == ([20.0], [300])
    assert made.seconds == [1.0, 1.0]


def test_rows_of_results_without_seconds_can_be_read(row):
    kept = {name: value for name, value in row(3.0).as_json().items() if name not in ("seconds", "median")}
    assert Row(**kept).median == 3.0
    assert Row(**kept).seconds == []
