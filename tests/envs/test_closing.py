"""Closes: of what environments started, and those that never end, which are left behind with a line."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import threading
import time
from typing import Any

import gymnasium
import pytest

from lockstep.config.run import EnvConfig
from lockstep.core.process import STOP_SIGNALS
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium import in_process
from lockstep.envs.gymnasium.keyed import close_environment
from lockstep.envs.gymnasium.workers import WorkerEnvs
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs

LINGERING = "heedless:Lingering-v0"


class Slow(gymnasium.Env):
    """Waits in its close for as long as it is told, and notes the thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.thread = seconds, None

    def close(self) -> None:
        self.thread = threading.current_thread()
        time.sleep(self.seconds)


def begun(timeout: float) -> HostEnvs:
    """Two environments that have taken a step."""
    config = EnvConfig(id=LINGERING, timeout=timeout)
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail)
    envs.reset()
    envs.step()
    return envs


def test_stop_signals_end_programs_that_an_environment_started_and_no_worker(tmp_path, monkeypatch):
    codes = tmp_path / "codes"
    config = EnvConfig(id="odd_factories:Accompanied", workers=1)
    described = describe(config)
    monkeypatch.setenv("CODES", str(codes))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by programs too
    try:
        envs = make_envs(config, described, 0, range(1), pytest.fail)
    finally:
        signal.signal(signal.SIGHUP, before)
    with contextlib.closing(envs):
        assert isinstance(envs, WorkerEnvs)
        envs.reset()
        worker = envs._processes[0].pid
        envs.begin_step()
        for number in STOP_SIGNALS:
            os.kill(worker, number)  # in the middle of a step
        envs.end_step()
        envs.step()
        assert envs.buffers.observations[0, 1] == 2  # steps
    assert codes.read_text() == str([-number for number in STOP_SIGNALS])


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup: a closed terminal is ignored")
def test_stop_signals_end_no_worker_that_has_just_been_started(monkeypatch):
    start = multiprocessing.process.BaseProcess.start

    def stopped(process):
        start(process)
        for number in STOP_SIGNALS:
            os.kill(process.pid, number)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", stopped)
    config, before = EnvConfig(id=LINGERING, workers=2), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with contextlib.closing(make_envs(config, describe(config), 0, range(2), pytest.fail)) as envs:
        assert isinstance(envs, WorkerEnvs)
        envs.reset()
        codes = [process.exitcode for process in envs._processes]
    assert codes == [None, None]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_close_that_hangs_is_left_behind_with_a_line(capsys):
    assert close_environment(Slow(3600), "environment 3 (Slow)", 0.1) is False
    assert capsys.readouterr().err == (
        "lockstep: warning: environment 3 (Slow) wasn't closed within 0.1 s, and is left behind\n"
    )


def test_one_that_ends_stays_in_its_thread_and_nothing_is_said(capsys):
    env = Slow(0.0)
    assert close_environment(env, "environment 3 (Slow)", 600.0) is True
    assert env.thread is threading.current_thread()
    assert capsys.readouterr().err == ""


def test_timers_and_handlers_of_others_are_put_back():
    def handler(*_: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, handler), signal.setitimer(signal.ITIMER_REAL, 600.0)
    try:
        close_environment(Slow(0.0), "environment 3 (Slow)", 1.0)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 500.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600.0
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.setitimer(signal.ITIMER_REAL, *before[1])


def test_another_thread_closes_without_a_limit(capsys):
    env = Slow(0.2)
    thread = threading.Thread(target=close_environment, args=(env, "environment 3 (Slow)", 0.01))
    thread.start()
    thread.join()
    assert env.thread is thread
    assert capsys.readouterr().err == ""


def test_every_environment_of_a_rank_is_named_and_left(monkeypatch, capsys):
    envs = begun(0.4)
    monkeypatch.setenv("LINGERS", "1")
    envs.close()
    assert capsys.readouterr().err.splitlines() == [
        f"lockstep: warning: environment {number} ({LINGERING}) wasn't closed within 0.2 s, and is left behind"
        for number in range(2)
    ]


def test_after_a_failure_there_is_less_time(monkeypatch, capsys):
    envs = begun(600.0)
    monkeypatch.setenv("LINGERS", "1")
    monkeypatch.setattr(in_process, "FAILED_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="the motor is gone"), contextlib.closing(envs):
        raise RuntimeError("the motor is gone")
    assert capsys.readouterr().err.count("wasn't closed within 0.1 s") == 2


def test_where_nothing_can_interrupt_it_the_watchdog_ends_the_process(monkeypatch):
    said, released = [], threading.Event()

    def fail(message: str) -> None:
        said.append(message)
        released.set()

    config = EnvConfig(id=LINGERING, timeout=600.0)
    envs: Any = make_envs(config, describe(config), 0, range(2), fail)
    envs.reset()
    envs.step()

    def close() -> None:
        envs._limit = envs._watchdog._limit = 0.2
        released.wait()

    monkeypatch.setattr(envs._sweeps[0].envs[1]._env, "close", close)
    thread = threading.Thread(target=envs.close)  # where signals aren't handled
    thread.start()
    thread.join(600)
    assert said == [f"environment 1 ({LINGERING}) didn't answer within 0.2 s (env.timeout)"]
