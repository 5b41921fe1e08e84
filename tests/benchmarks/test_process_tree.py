"""What processes use, read from a place that looks like /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.process_tree import ProcessTree, Sample

TICK = os.sysconf("SC_CLK_TCK")


def process(
    proc: Path, number: int, session: int, seconds: float, kilobytes: int, name: str = "python", parent: int = 1
) -> None:
    """A process of a session that has used CPU seconds, a quarter each as itself and by what it waited for."""
    place = proc / str(number)
    place.mkdir(exist_ok=True)
    ticks = round(seconds * TICK / 4)
    fields = ["S", parent, session, session, *[0] * 7, ticks, ticks, ticks, ticks]
    (place / "stat").write_text(f"{number} ({name}) {' '.join(map(str, fields))} 20 0")
    (place / "smaps_rollup").write_text(f"0-f ---p\nRss:  999999 kB\nPss:  {kilobytes} kB\nPss_Anon: 1 kB\n")


def test_all_processes_of_the_sessions_count_and_no_others(tmp_path):
    process(tmp_path, 10, 10, 2.0, 1000)
    process(tmp_path, 11, 10, 1.0, 500, name="a (strange) name")
    process(tmp_path, 20, 20, 4.0, 2000)
    process(tmp_path, 30, 30, 8.0, 4000)
    (tmp_path / "meminfo").write_text("no process")
    tree = ProcessTree({10, 20}, proc=tmp_path)
    tree.look()
    (seen,) = tree.samples
    assert seen.memory == 3500 * 1024
    assert seen.cpu == pytest.approx(7.0, abs=4 / TICK)


def test_what_is_started_in_sessions_of_its_own_counts_too(tmp_path):
    process(tmp_path, 10, 10, 1.0, 1)
    process(tmp_path, 20, 20, 1.0, 10, parent=10)
    process(tmp_path, 5, 5, 1.0, 100, parent=20)
    process(tmp_path, 6, 5, 1.0, 1000)  # its parent is gone, its session is one of theirs
    process(tmp_path, 7, 7, 1.0, 10_000)
    tree = ProcessTree({10}, proc=tmp_path)
    tree.look()
    assert tree.peak == 1111 * 1024


def test_the_peak_is_the_highest_sum_at_a_time(tmp_path):
    tree = ProcessTree({10}, proc=tmp_path)
    process(tmp_path, 10, 10, 1.0, 1000)
    process(tmp_path, 11, 10, 1.0, 10)
    tree.look()
    process(tmp_path, 10, 10, 1.0, 100)
    process(tmp_path, 11, 10, 1.0, 800)
    tree.look()
    assert [sample.memory for sample in tree.samples] == [1010 * 1024, 900 * 1024]
    assert tree.peak == 1010 * 1024


def test_a_process_that_ends_meanwhile_or_hides_is_left_out(tmp_path):
    process(tmp_path, 10, 10, 1.0, 1000)
    process(tmp_path, 11, 10, 1.0, 500)
    (tmp_path / "11" / "smaps_rollup").unlink()
    (tmp_path / "12").mkdir()
    tree = ProcessTree({10}, proc=tmp_path)
    tree.look()
    assert tree.peak == 1000 * 1024


def test_where_nothing_can_be_seen_there_is_no_figure(tmp_path):
    tree = ProcessTree({10}, proc=tmp_path / "nowhere")
    tree.look()
    assert (tree.samples, tree.peak, tree.cores_between(0.0, 1.0)) == ([], None, None)


def test_cpu_time_is_between_looks_inside_of_a_window():
    tree = ProcessTree(samples=[Sample(float(t), cpu, 1) for t, cpu in enumerate([0.0, 5.0, 6.0, 8.0, 9.0, 99.0])])
    assert tree.cores_between(0.5, 4.5) == pytest.approx((9.0 - 5.0) / 3)
    assert tree.cores_between(1.5, 2.5) is None


def test_looks_are_not_too_near_to_each_other(tmp_path):
    process(tmp_path, 10, 10, 1.0, 1000)
    seldom, often = ProcessTree({10}, 3600.0, proc=tmp_path), ProcessTree({10}, 0.0, float("inf"), proc=tmp_path)
    for _ in range(3):
        seldom.look_if_due()
        often.look_if_due()
    assert (len(seldom.samples), len(often.samples)) == (1, 3)


def test_what_is_timed_is_looked_at_less_and_its_memory_least(tmp_path, monkeypatch):
    process(tmp_path, 10, 10, 1.0, 1000)
    now, costs = [100.0], {"_cpu_seconds": 0.002, "_bytes": 0.008}
    monkeypatch.setattr("benchmarks.process_tree.time.perf_counter", lambda: now[0])
    held = {"_cpu_seconds": 1.0, "_bytes": 1000 * 1024}

    def slowly(name):
        now[0] += costs[name]
        return held[name]

    monkeypatch.setattr(ProcessTree, "_cpu_seconds", lambda self, path: slowly("_cpu_seconds"))
    monkeypatch.setattr(ProcessTree, "_bytes", staticmethod(lambda path: slowly("_bytes")))

    def looks(timed):
        tree, end = ProcessTree({10}, shortest=0.05, proc=tmp_path), now[0] + 20
        while now[0] < end:
            tree.look_if_due(timed)
            now[0] += 0.01
        assert tree.peak == 1000 * 1024
        return len(tree.samples), sum(sample.memory is not None for sample in tree.samples)

    often, seldom = looks(False), looks(True)
    assert often[0] > 5 * seldom[0]
    assert often[1] > 5 * seldom[1]
    assert seldom[0] > 2 * seldom[1]
    assert sum(n * cost for n, cost in zip(seldom, costs.values(), strict=True)) < 20 * 2 * 0.02 * 0.2
