"""Watching over ranks from outside: every run comes to its end, whatever the ranks do."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.doctor import supervisor
from lockstep.doctor.judge.endings import failure_finding
from lockstep.doctor.judge.traces import read_traces
from lockstep.doctor.supervisor import STOP, OneRank, Outcome, Supervisor, await_leaving, await_verdict
from lockstep.doctor.watch.side_store import ENDED, SideWriter, rank_directory, read_json, write_json

STAYS = [sys.executable, "-c", "import time; time.sleep(3600)"]
SUCCEEDS = [sys.executable, "-c", ""]
FAILS = [sys.executable, "-c", "import sys; sys.exit(3)"]


def outcome_of(store, own, others=(), *, judges=True, wait_limit=0.3, run_limit=None, states=()):
    """What a supervisor of rank 0 makes of its own rank and of what the others said."""
    for rank, ended in enumerate(others, 1):
        writer = SideWriter(store, rank)
        if ended is not None:
            write_json(writer.path / ENDED, {"code": ended, "at": 0.0})
    for rank, state in enumerate(states):
        SideWriter(store, rank).state(state)
    limits = {"wait_limit": wait_limit, "run_limit": run_limit}
    began = time.monotonic()
    outcome = Supervisor(OneRank(own, 0), store, 1 + len(others), judges=judges, **limits).wait()
    return outcome, time.monotonic() - began


@pytest.mark.parametrize(("command", "code"), [(SUCCEEDS, 0), (FAILS, 3)])
def test_ranks_that_end_are_waited_for(tmp_path, command, code):
    outcome, _ = outcome_of(tmp_path, command, [0])
    assert outcome == Outcome()
    assert (read_json(rank_directory(tmp_path, 0) / ENDED) or {})["code"] == code
    assert not (tmp_path / STOP).exists()


def test_a_rank_that_waits_for_one_that_ended_is_ended(tmp_path):
    outcome, _ = outcome_of(tmp_path, STAYS, [0], states=[{"waiting": 1.0, "certain": True}])
    assert outcome == Outcome(deadlock=True)
    assert (tmp_path / STOP).exists()
    assert read_json(rank_directory(tmp_path, 0) / ENDED) is None  # it came to no end of its own


def test_a_rank_that_stands_still_may_be_busy_though_another_has_ended(tmp_path):
    outcome, _ = outcome_of(tmp_path, STAYS, [0], states=[{"waiting": 1.0}], run_limit=0.5)
    assert outcome == Outcome(stopped=True)


@pytest.mark.parametrize(
    ("certain", "seconds", "deadlock"), [(True, 1.0, True), (False, 1.0, False), (False, 6 * 0.3 + 0.1, True)]
)
def test_ranks_that_may_only_be_busy_are_given_longer(tmp_path, certain, seconds, deadlock):
    states = [{"waiting": seconds, "certain": certain}, {"waiting": seconds, "certain": True}]
    outcome, _ = outcome_of(tmp_path, STAYS, [None], states=states, run_limit=None if deadlock else 0.5)
    assert outcome == Outcome(deadlock=deadlock, stopped=not deadlock)


@pytest.mark.parametrize(
    "states", [[{}], [{"waiting": 0.1}], [{"waiting": 1.0}, {}], [{"waiting": 1.0}, {"waiting": 0}]]
)
def test_while_any_rank_moves_nothing_is_ended(tmp_path, states):
    others = [None] * (len(states) - 1) or [0]
    outcome, seconds = outcome_of(tmp_path, STAYS, others, states=states, run_limit=1.0)
    assert outcome == Outcome(stopped=True)
    assert seconds >= 1.0


def test_processes_that_outlive_their_scripts_are_ended(tmp_path):
    outcome, _ = outcome_of(tmp_path, STAYS, [0], states=[{"over": True}])
    assert outcome == Outcome()


def test_ranks_that_outlive_a_failure_are_ended(tmp_path):
    outcome, _ = outcome_of(tmp_path, STAYS, [1])
    assert outcome == Outcome()


def test_who_does_not_judge_follows(tmp_path):
    (tmp_path / STOP).touch()
    outcome, _ = outcome_of(tmp_path, STAYS, [0], judges=False)
    assert outcome == Outcome()


def test_the_verdict_is_read_by_all_before_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "VERDICT_SECONDS", 600.0)
    rank_directory(tmp_path, 1).mkdir()
    write_json(tmp_path / "verdict.json", {"status": 2})
    assert await_verdict(tmp_path, 1) == 2
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 600.0)
    began = time.monotonic()
    await_leaving(tmp_path, [1])
    assert time.monotonic() - began < 300.0  # it doesn't wait for its limit


def test_a_rank_that_works_on_keeps_the_others_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "VERDICT_SECONDS", 0.5)
    working = rank_directory(tmp_path, 0)
    working.mkdir()
    rank_directory(tmp_path, 1).mkdir()
    polls = []

    def poll(seconds):
        polls.append(seconds)
        if len(polls) <= 12:  # longer than the limit
            write_json(working / "state.json", {"waiting": None})
            os.utime(working / "state.json", ns=(len(polls), len(polls)))
        elif len(polls) == 13:
            write_json(tmp_path / "verdict.json", {"status": 0})

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: sum(polls), sleep=poll))
    assert await_verdict(tmp_path, 1) == 0
    assert sum(polls) > 1.0


def test_without_a_sign_of_life_nobody_waits_for_a_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "VERDICT_SECONDS", 0.3)
    rank_directory(tmp_path, 0).mkdir()
    write_json(rank_directory(tmp_path, 0) / "state.json", {"waiting": None})
    assert await_verdict(tmp_path, 1) == 1
    assert "rank 0 gave no verdict within 0.3 s" in capsys.readouterr().err


def test_the_rank_that_failed_first_is_named_though_hosts_have_run_for_other_times(tmp_path, monkeypatch):
    """A host's monotonic clock counts from when it was started."""
    ours = time.monotonic
    for rank, uptime in ((1, 1e6), (0, 0.0)):  # rank 1 fails first
        clock = SimpleNamespace(monotonic=lambda uptime=uptime: ours() + uptime, time=time.time, sleep=time.sleep)
        monkeypatch.setattr(supervisor, "time", clock)
        limits: dict = {"judges": False, "wait_limit": 1.0, "run_limit": None}
        Supervisor(OneRank(FAILS, rank), tmp_path, 2, **limits).wait()
    traces = read_traces(tmp_path, range(2))
    found = failure_finding(traces, interrupted=False, deadlock=False)
    assert found is not None
    assert found.text == "the script failed: rank 1 ended with exit status 3"
