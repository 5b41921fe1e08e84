"""What a sweep's directory remembers, and what it doesn't take for done."""

import csv
import json

import pytest

from lockstep.config.run import Config
from lockstep.scaling.ledger import BENCH, open_ledger, read_ledger, unfinished, write_tables
from lockstep.scaling.measure import Outcome
from lockstep.scaling.plan import Plan

GOOD = Outcome([{"iteration": 1, "t_iter": [0.1 + 0.2]}, {"iteration": 2, "t_iter": [1e-9]}], None, 4.5)
BAD = Outcome([], "rank 1: it broke", 2.0)


def plan_of(repeats=1, **config):
    return Plan(Config.model_validate({"num_envs": 8} | config), "weak", (1, 2), repeats=repeats)


@pytest.fixture
def plan():
    return plan_of()


def names(jobs):
    return [job.name for job in jobs]


def finished(path, plan):
    ledger = open_ledger(path, plan)
    for job in plan.jobs():
        ledger.record(job, GOOD)
    return ledger


def test_a_new_sweep_misses_everything(tmp_path, plan):
    assert open_ledger(tmp_path / "new", plan).missing(plan) == plan.jobs()


def test_what_was_recorded_comes_back_as_it_was(tmp_path, plan):
    job = plan.jobs()[0]
    open_ledger(tmp_path, plan).record(job, GOOD)
    outcome = open_ledger(tmp_path, plan).outcome(job)
    assert outcome is not None
    assert (outcome.error, outcome.seconds) == (None, 4.5)
    facts = {"kind": job.kind, "world_size": job.world_size, "repeat": job.repeat}
    assert outcome.records == [facts | record for record in GOOD.records]
    assert open_ledger(tmp_path, plan).missing(plan) == plan.jobs()[1:]


def test_what_failed_is_tried_again(tmp_path, plan):
    job, *others = plan.jobs()
    ledger = finished(tmp_path, plan)
    ledger.record(job, BAD)
    assert ledger.missing(plan) == [job]
    outcome = ledger.outcome(job)
    assert outcome is not None
    assert outcome.error == "rank 1: it broke"
    assert all(ledger.outcome(other) is not None for other in others)


def test_a_job_that_is_begun_again_is_not_done(tmp_path, plan):
    job = plan.jobs()[1]
    finished(tmp_path, plan).begin(job)
    ledger = open_ledger(tmp_path, plan)
    assert ledger.missing(plan) == [job]
    assert not ledger.log(job).exists()


@pytest.mark.parametrize("damage", ["changed", "shortened", "removed"])
def test_a_log_that_is_not_as_it_was_written_is_not_done(tmp_path, plan, damage):
    ledger, job = finished(tmp_path, plan), plan.jobs()[2]
    log = ledger.log(job)
    if damage == "changed":
        log.write_text(log.read_text().replace("1e-09", "2e-09"))
    elif damage == "shortened":
        log.write_text(log.read_text().splitlines(keepends=True)[0])
    else:
        log.unlink()
    assert ledger.missing(plan) == [job]


def test_more_repeats_go_on_with_what_is_there(tmp_path, plan):
    finished(tmp_path, plan)
    more = plan_of(repeats=2)
    missing = open_ledger(tmp_path, more).missing(more)
    assert {job.repeat for job in missing} == {2}
    assert len(missing) == len(plan.jobs())


def test_another_measurement_is_refused_and_nothing_is_touched(tmp_path, plan):
    finished(tmp_path, plan)
    before = (tmp_path / BENCH).read_bytes()
    with pytest.raises(ValueError, match="was measured with num_steps 128 and this is 64; choose another --name"):
        open_ledger(tmp_path, plan_of(num_steps=64))
    assert (tmp_path / BENCH).read_bytes() == before


def test_a_directory_that_is_something_else_is_refused(tmp_path, plan):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="exists already and is no bench; choose another --name"):
        open_ledger(tmp_path, plan)
    assert names(tmp_path.iterdir()) == ["config.json"]


def test_a_sweep_killed_before_its_first_word_begins_again(tmp_path, plan):
    (tmp_path / "logs").mkdir()
    (tmp_path / f".{BENCH}.tmp").write_text('{"iden')
    assert open_ledger(tmp_path, plan).missing(plan) == plan.jobs()


def test_a_ledger_that_cannot_be_read_is_none(tmp_path):
    assert read_ledger(tmp_path) is None
    (tmp_path / BENCH).write_text('{"identity": {}')
    assert read_ledger(tmp_path) is None


def test_the_unfinished_sweep_of_the_same_command_is_found(tmp_path, plan):
    assert unfinished(tmp_path, "bench-x", plan) is None
    first, second = tmp_path / "bench-x-1", tmp_path / "bench-x-2"
    open_ledger(first, plan)
    finished(second, plan)
    finished(tmp_path / "other-x-3", plan).begin(plan.jobs()[0])
    assert unfinished(tmp_path, "bench-x", plan) == first
    assert unfinished(tmp_path, "bench-x", plan_of(repeats=2)) is None
    assert unfinished(tmp_path, "bench-x", plan_of(seed=1)) is None
    finished(first, plan)
    assert unfinished(tmp_path, "bench-x", plan) is None


def test_both_tables_hold_the_same(tmp_path):
    rows = [{"name": "a", "value": 0.1 + 0.2, "list": [1.5, 2.5]}, {"name": "b, c", "value": None, "list": None}]
    write_tables(tmp_path, "table", rows)
    assert json.loads((tmp_path / "table.json").read_text()) == rows
    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"name": "a", "value": repr(0.1 + 0.2), "list": "1.5;2.5"},
            {"name": "b, c", "value": "", "list": ""},
        ]
    assert sorted(names(tmp_path.iterdir())) == ["table.csv", "table.json"]
