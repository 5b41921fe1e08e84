"""When a session ends, and in what words."""

import os
import signal
import time

import pytest

from lockstep.config.run import Config, RunOptions
from lockstep.core.process import REPEAT_SECONDS, started_by_command
from lockstep.core.topology import LAUNCHER_VARIABLE
from lockstep.training.stop import (
    FINISHED,
    RUNNING,
    STEP_LIMIT,
    TIME_LIMIT,
    StopRequest,
    reached,
    status_of,
    stop_code,
    stop_requests,
)

CONFIG = Config.model_validate({"num_envs": 8, "num_steps": 16, "total_steps": 1280})


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (FINISHED, ("finished", None)),
        (STEP_LIMIT, ("stopped at step", None)),
        (TIME_LIMIT, ("stopped at time limit", None)),
        (128 + signal.SIGTERM, ("stopped by signal 15", 15)),
        (128 + signal.SIGINT, ("stopped by signal 2", 2)),
    ],
)
def test_each_code_has_its_words(stop, expected):
    assert status_of(stop) == expected


def test_a_run_that_goes_on_has_no_status():
    with pytest.raises(KeyError):
        status_of(RUNNING)


@pytest.mark.parametrize(
    ("stop_at_step", "iteration", "expected"),
    [
        (None, 9, RUNNING),
        (None, 10, FINISHED),
        (1000, 7, RUNNING),  # 896 steps
        (1000, 8, STEP_LIMIT),
        (1280, 10, FINISHED),  # the end of the run goes before a limit of the session
    ],
)
def test_limits_in_steps(stop_at_step, iteration, expected):
    assert reached(CONFIG, RunOptions(stop_at_step=stop_at_step), iteration, 128 * iteration) == expected


@pytest.mark.parametrize(("hours", "expected"), [(None, RUNNING), (1.0, RUNNING), (0.5, TIME_LIMIT)])
def test_the_time_limit_counts_from_the_sessions_start(monkeypatch, hours, expected):
    monkeypatch.setattr(time, "monotonic", lambda: 10_000.0 + 2700.0)
    assert stop_code(StopRequest(), RunOptions(max_hours=hours), 10_000.0) == expected


def test_a_signal_goes_before_the_time_limit_and_is_the_higher_code():
    with stop_requests() as request:
        assert stop_code(request, RunOptions(max_hours=1e-9), -1.0) == TIME_LIMIT
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_code(request, RunOptions(max_hours=1e-9), -1.0) == 128 + signal.SIGTERM
    assert max(RUNNING, TIME_LIMIT, 128 + signal.SIGTERM) == 128 + signal.SIGTERM


def test_the_second_interrupt_ends_at_once():
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def interrupted() -> bool:
    """Whether an interrupt ends what is running at once."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_after_another_signal_is_the_first_one():
    """It stops the run as asked, and only the next one ends it at once; a signal after it is told instead of it."""
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not interrupted()
        assert request.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == signal.SIGTERM
        assert not interrupted()
        assert interrupted()


def test_a_rank_leaves_it_to_its_launcher_to_end_it_at_once(monkeypatch):
    monkeypatch.setenv(LAUNCHER_VARIABLE, "1")
    with stop_requests() as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert request.signal == signal.SIGINT


def test_an_interrupt_that_is_passed_on_is_not_a_second_one(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    started_by_command.set()
    try:
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            assert request.signal == signal.SIGINT
            now[0] += 2 * REPEAT_SECONDS
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        started_by_command.clear()


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_handlers_that_environments_set_are_replaced_and_those_before_the_run_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as request:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert stop_code(request, RunOptions(), 0.0) == RUNNING
        assert signal.getsignal(signal.SIGTERM) == request
    assert signal.getsignal(signal.SIGTERM) == before
    request.take_signals()  # outside of the block: it leaves them alone
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "a terminal"])
def test_which_signals_are_the_runs_is_settled_before_environments_set_handlers(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stop_requests() as request:
            signal.signal(signal.SIGHUP, (lambda *_: None) if ignored else signal.SIG_IGN)
            request.take_signals()
            assert (signal.getsignal(signal.SIGHUP) == request) == (not ignored)
    finally:
        signal.signal(signal.SIGHUP, before)
