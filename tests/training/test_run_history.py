"""What a run remembers through its sessions."""

import datetime
from math import inf, nan

import pytest

from lockstep.config.run import Config
from lockstep.training.run_history import RunHistory, utc_date, with_first_machine, with_rows


def test_the_best_evaluation_stays_and_the_newest_wins_among_equals():
    history = RunHistory.of(None, "now")
    for step, value in ((1, -3.0), (2, 5.0), (3, 5.0), (4, 1.0)):
        history.evaluated(step, value)
    assert history.best_evaluation == {"step": 3, "return_mean": 5.0}
    assert history.last_evaluation == {"step": 4, "return_mean": 1.0}
    assert history.score == 1.0
    assert RunHistory.of(history.to_json(), "later") == history
    assert RunHistory.of(None, "later") == RunHistory("later")


def test_a_number_takes_the_place_of_nan_and_never_the_reverse():
    history = RunHistory.of(None, "now")
    for step, value, best in ((1, nan, 1), (2, nan, 1), (3, -inf, 3), (4, nan, 3), (5, -2.0, 5), (6, nan, 5)):
        history.evaluated(step, value)
        assert history.best_evaluation is not None
        assert history.best_evaluation["step"] == best
        assert [history.is_best_at(before) for before in range(1, step + 1)].count(True) == 1
    assert history.last_evaluation is not None
    assert history.last_evaluation["step"] == 6


def test_a_score_is_that_of_the_step_that_was_evaluated():
    history = RunHistory.of(None, "now")
    history.score = 3.0  # of the last episodes
    assert [history.score_at(1, evaluates) for evaluates in (False, True)] == [3.0, None]
    history.evaluated(2, 5.0)
    history.evaluated(3, 4.0)
    assert [history.score_at(step, True) for step in (2, 3, 4)] == [None, 4.0, None]
    assert [history.is_best_at(step) for step in (2, 3)] == [True, False]


def test_another_length_is_kept_where_a_schedule_follows_it():
    linear, constant = (Config.model_validate({"ppo": {"schedule": name}}) for name in ("linear", "constant"))
    for config, changes in ((linear, [{"global_step": 256, "was": 1024, "is": 4096}]), (constant, [])):
        history = RunHistory.of(None, "now")
        history.record_length(config.model_copy(update={"total_steps": 1024}), 0)
        history.record_length(config.model_copy(update={"total_steps": 1024}), 128)
        history.record_length(config.model_copy(update={"total_steps": 4096}), 256)
        assert history.lengths == changes
        assert RunHistory.of(history.to_json(), "later").lengths == changes


def test_a_change_of_the_order_of_sums_is_kept_where_the_agent_depends_on_it():
    row = {"global_step": 256, "setting": "collectives", "was": "auto", "is": "backend"}
    for reduction, orders in (("fast", [row]), ("exact", [])):
        config = Config.model_validate({"reduction": reduction})
        history = RunHistory.of(None, "now")
        for collectives, step in (("auto", 0), ("auto", 128), ("backend", 256), ("backend", 384)):
            history = RunHistory.of(history.to_json() if step else None, "later")
            history.record_settings(config.model_copy(update={"collectives": collectives}), step)
        assert history.orders == history.departures()["orders"] == orders
    unknown = RunHistory.of({}, "later")  # a version that didn't record them began the run
    unknown.record_settings(Config.model_validate({"reduction": "fast", "collectives": "backend"}), 128)
    assert unknown.orders == []


def test_before_the_first_step_nothing_is_a_change():
    """As in a run that ended before it and is begun again with other settings."""
    config = Config.model_validate({"reduction": "fast", "ppo": {"schedule": "linear"}, "total_steps": 1024})
    history = RunHistory.of(None, "now")
    history.record_settings(config, 0)
    history = RunHistory.of(history.to_json(), "later")
    history.record_settings(config.model_copy(update={"total_steps": 4096, "collectives": "backend"}), 0)
    assert (history.lengths, history.orders) == ([], [])


def test_equal_rows_of_restarts_stay_as_often_as_the_list_with_more_has_them():
    a, b = {"why": "killed"}, {"why": "gone"}
    assert with_rows([a], [a, a, b]) == [a, a, b]
    assert with_rows([a, a, b], [a]) == [a, a, b]
    assert with_rows([], [a, a]) == [a, a]


def test_the_first_machine_and_versions_stay_and_the_step_at_which_others_came():
    first, other = {"torch": "2.12", "cpu": "one"}, {"torch": "2.13", "cpu": "one"}
    history = RunHistory.of(None, "now")
    for facts, step, until in ((first, 0, None), (first, 128, None), (other, 256, 256), (other, 384, 256)):
        history = RunHistory.of(history.to_json() if step else None, "later")
        history.record_machine(facts | {"world_size": step}, step)  # the number of ranks may change
        assert (history.first_machine, history.first_machine_until) == (first, until)
    unknown = RunHistory.of({}, "later")
    unknown.record_machine(other, 128)
    assert (unknown.first_machine, unknown.first_machine_until) == (None, None)


def test_a_summary_is_read_with_the_first_machine_in_place_of_the_last_sessions():
    summary = {"status": "finished", "torch": "2.13", "platform version": "CUDA 13"}
    assert with_first_machine(summary) == summary
    assert with_first_machine(summary | {"first_machine": None}) == summary | {"first_machine": None}
    began = {"first_machine": {"torch": "2.12"}}
    assert with_first_machine(summary | began) == {"status": "finished", "torch": "2.12"} | began


@pytest.mark.parametrize("odd", [{}, {"started": 7, "best_evaluation": [1], "last_evaluation": {"return_mean": "x"}}])
def test_what_another_version_left_out_is_unknown(odd):
    history = RunHistory.of(odd, "later")
    assert history == RunHistory()
    history.evaluated(8, 2.0)
    assert history.best_evaluation == history.last_evaluation == {"step": 8, "return_mean": 2.0}


def test_dates_are_utc(monkeypatch):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(1e9, tz)

    monkeypatch.setattr(datetime, "datetime", Clock)
    assert utc_date() == "2001-09-09T01:46:40+00:00"
    assert utc_date(3600) == "2001-09-09T00:46:40+00:00"
