"""The tables of a sweep, by hand: what is averaged, what is compared with what, and what never enters."""

import math
from dataclasses import replace

import pytest

from lockstep.config.run import Config
from lockstep.scaling.measure import Outcome, side_by_side
from lockstep.scaling.plan import Job, Plan
from lockstep.scaling.summarize import PARTS, interval, ratio_interval, run_row, student, summary_rows

PLAN = Plan(Config.model_validate({"num_envs": 8, "num_steps": 16}), "weak", (1, 2), repeats=2, warmup_iters=1, iters=2)


def record(t_iter, steps=128, copy=0, measured=True, ended=0.0, collectives=0, **more):
    """One iteration: a value of ``t_iter`` for each rank; everything else zero."""
    zeros = [0.0] * len(t_iter)
    lists = dict.fromkeys((*PARTS, "bytes", "peak_memory_mb", "peak_gpu_memory_mb"), zeros)
    facts = {"steps": steps, "copy": copy, "measured": measured, "ended": ended, "collectives": collectives}
    return facts | {"t_iter": t_iter} | lists | more


def test_a_run_is_the_mean_of_its_measured_iterations_and_ranks():
    records = [
        record([9.0, 9.0], 256, measured=False, collectives=99, t_comm=[8.0, 8.0], peak_memory_mb=[900.0, 900.0]),
        record([1.0, 1.0], 256, collectives=4, t_wait=[0.2, 0.0], t_comm=[0.1, 0.1], peak_memory_mb=[300.0, 310.0]),
        record([3.0, 3.0], 256, collectives=6, t_wait=[0.4, 0.0], t_comm=[0.3, 0.3], peak_memory_mb=[305.0, 311.0]),
    ]
    row = run_row(Job("run", 2, 1), PLAN, Outcome(records, None, 7.5))
    assert (row["status"], row["iterations"], row["num_envs"], row["num_shards"], row["seconds"]) == (
        "ok",
        2,
        16,
        16,
        7.5,
    )
    assert row["steps_per_second"] == pytest.approx(512 / 4.0)
    assert (row["t_iter"], row["t_iter_median"], row["collectives"]) == pytest.approx((2.0, 2.0, 5.0))
    assert (row["t_wait"], row["t_comm"]) == pytest.approx((0.15, 0.2))
    assert row["t_wait_by_rank"] == pytest.approx([0.3, 0.0])
    assert (row["peak_memory_mb"], row["peak_memory_mb_by_rank"]) == (311.0, [305.0, 311.0])


def test_a_ceiling_adds_the_runs_up():
    records = [record([1.0], copy=0), record([1.0], copy=0), record([4.0], copy=1)]
    row = run_row(Job("ceiling", 2, 1), PLAN, Outcome(records))
    assert row["steps_per_second"] == pytest.approx(128 / 1.0 + 128 / 4.0)
    assert (row["num_envs"], row["iterations"]) == (8, 3)
    assert row["t_iter"] == pytest.approx(2.5)


def test_a_failed_run_is_a_row_that_says_so_and_has_no_numbers():
    row = run_row(Job("run", 2, 1), PLAN, Outcome([record([1.0, 1.0])], "rank 1: out of memory", 3.0))
    assert (row["status"], row["error"]) == ("failed", "rank 1: out of memory")
    assert row["steps_per_second"] is None
    assert row["t_iter"] is None
    assert list(row) == list(run_row(Job("run", 1, 1), PLAN, Outcome([record([1.0])])))  # one table's columns


def test_what_an_engine_does_not_tell_is_left_blank():
    known = {"steps": 128, "copy": 0, "measured": True, "t_iter": [2.0], "peak_memory_mb": [300.0], "ended": 1.0}
    row = run_row(Job("run", 1, 1), PLAN, Outcome([known, known]))
    assert (row["t_iter"], row["steps_per_second"], row["peak_memory_mb"]) == (2.0, 64.0, 300.0)
    assert [row[name] for name in (*PARTS, "collectives", "bytes", "peak_gpu_memory_mb")] == [None] * 8
    summary = summary_rows([row], PLAN)
    assert (summary[0]["t_iter"], summary[0]["t_comm"], summary[0]["peak_memory_mb"]) == (2.0, None, 300.0)


def rows_of(speeds, failed=()):
    """Rows of runs with these steps/s by ``(kind, world size, repeat)``."""
    out = []
    for key, speed in speeds.items():
        ranks = key[1] if key[0] == "run" else 1
        copies = key[1] if key[0] == "ceiling" else 1
        seconds = 128 * copies / speed
        records = [record([seconds] * ranks, 128, copy) for copy in range(copies)]
        out.append(run_row(Job(*key), PLAN, Outcome(records, "it broke" if key in failed else None)))
    return out


SPEEDS = {
    ("run", 1, 1): 100.0,
    ("ceiling", 2, 1): 160.0,
    ("run", 2, 1): 120.0,
    ("run", 1, 2): 50.0,
    ("ceiling", 2, 2): 100.0,
    ("run", 2, 2): 80.0,
}


def test_speed_up_and_efficiency_compare_runs_of_one_repeat():
    one, two = summary_rows(rows_of(SPEEDS), PLAN)
    assert (one["speedup"], one["efficiency"], one["ceiling_efficiency"]) == pytest.approx((1.0, 1.0, 1.0))
    assert one["efficiency_low"] is None
    assert (one["steps_per_second"], two["steps_per_second"]) == pytest.approx((75.0, 100.0))
    assert two["speedup"] == pytest.approx(math.sqrt(1.2 * 1.6))
    assert two["efficiency"] == pytest.approx(math.sqrt(0.6 * 0.8))
    assert two["ceiling_steps_per_second"] == pytest.approx(130.0)
    assert two["ceiling_efficiency"] == pytest.approx(math.sqrt(0.75 * 0.8))


def test_the_confidence_interval_by_hand():
    two = summary_rows(rows_of(SPEEDS), PLAN)[1]
    # Two values have a standard error of half their distance; Student's t with one degree of freedom: 12.706.
    middle, half = math.log(0.6 * 0.8) / 2, 12.706 * abs(math.log(0.8 / 0.6)) / 2
    assert two["efficiency_low"] == pytest.approx(math.exp(middle - half))
    assert two["efficiency_high"] == pytest.approx(math.exp(middle + half))


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (30, 2.042), (31, 2.0395), (40, 2.0211), (99, 1.9842), (120, 1.9799), (10**6, 1.96)],
)
def test_students_quantiles_are_those_of_tables(freedom, quantile):
    """Beyond the module's own table, too, where the normal quantile would be 4 % too small."""
    assert student(freedom) == pytest.approx(quantile, abs=1e-4)


def test_intervals():
    assert interval([1.0]) is None
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    low, high = interval([0.0, 2.0] * 50) or (0.0, 0.0)
    assert (low, high) == pytest.approx((1 - 0.1994, 1 + 0.1994), abs=1e-4)
    assert ratio_interval([2.0]) is None
    assert ratio_interval([2.0, 2.0, 2.0]) == pytest.approx((2.0, 2.0))


def test_a_failed_run_enters_no_average():
    slow = SPEEDS | {("run", 2, 1): 1.0}
    one, two = summary_rows(rows_of(slow, failed=[("run", 2, 1)]), PLAN)
    assert (one["runs"], one["failed"], two["runs"], two["failed"]) == (2, 0, 1, 1)
    assert (two["steps_per_second"], two["speedup"], two["efficiency"]) == pytest.approx((80.0, 1.6, 0.8))
    assert two["efficiency_low"] is None
    assert summary_rows(rows_of(slow), PLAN)[1]["steps_per_second"] == pytest.approx(40.5)  # had it not failed


def test_a_world_size_without_a_run_has_no_numbers():
    keys = [("run", 2, 1), ("run", 2, 2)]
    two = summary_rows(rows_of(SPEEDS, failed=keys), PLAN)[1]
    assert (two["runs"], two["failed"]) == (0, 2)
    assert {two[k] for k in ("steps_per_second", "speedup", "efficiency", "t_iter", "peak_memory_mb")} == {None}
    assert two["ceiling_steps_per_second"] == pytest.approx(130.0)


def test_rows_that_were_not_asked_for_enter_no_average():
    two = summary_rows(rows_of(SPEEDS), replace(PLAN, repeats=1))[1]
    assert (two["runs"], two["speedup"]) == pytest.approx((1, 1.2))


def test_the_smallest_world_size_is_the_base():
    rows = rows_of({("run", 2, 1): 100.0, ("run", 4, 1): 150.0})
    two, four = summary_rows(rows, replace(PLAN, world_sizes=(2, 4)))
    assert (two["efficiency"], four["speedup"], four["efficiency"]) == pytest.approx((1.0, 1.5, 0.75))


# --- runs side by side ------------------------------------------------------------------------------------------


def copies_of(*ends):
    """Runs by when their iterations end; an iteration begins where the one before ends, the first a second before."""
    out = []
    for times in ends:
        starts = [times[0] - 1.0, *times[:-1]]
        out.append([{"ended": e, "t_iter": [e - s]} for s, e in zip(starts, times, strict=True)])
    return out


def test_iterations_count_while_all_runs_are_under_way():
    early = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    late = [3.5, 4.5, 5.5]
    flags = side_by_side(copies_of(early, late), warmup_iters=1)
    # The later one is warm at 3.5, and 5.5 is the last that is known of it.
    assert flags == [[False, False, False, False, True, False], [False, True, True]]


def test_nothing_counts_before_every_run_is_warm():
    assert side_by_side(copies_of([1.0, 2.0, 3.0], [1.5]), warmup_iters=1) == [[False] * 3, [False]]
    assert side_by_side([[], copies_of([1.0])[0]], warmup_iters=0) == [[], [False]]


def test_runs_in_step_all_count():
    assert side_by_side(copies_of([1.0, 2.0], [1.0, 2.0]), warmup_iters=0) == [[True, True], [True, True]]
