"""Whatever is raised while a call waits ends its run with a checkpoint, and is raised: by signals, in coroutines."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.python import command

SETTINGS: dict[str, Any] = {"num_steps": 16, "total_steps": 10**8, "quiet": True, "checkpoint": {"interval": 10**6}}


class TooLateError(Exception):
    """What a signal handler raises when time is up."""


class Acting:
    """Calls ``act`` after the third iteration, and notes what it is told besides."""

    def __init__(self, act):
        self.act, self.told = act, []

    def on_iteration(self, record):
        if record["iteration"] == 3:
            self.act()

    def on_checkpoint(self, path):
        self.told.append(path.name)

    def on_end(self, run):
        self.told.append(run.status)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def alarm():
    """Has an error raised in this process, half a second after it is called: :class:`TooLateError`, or another."""
    kinds: list[type[BaseException]] = [TooLateError]

    def handler(_number, _frame):
        raise kinds[-1]("time is up")

    def begin(*others):
        kinds.extend(others)
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    previous = signal.signal(signal.SIGALRM, handler)
    yield begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("observes", [False, True], ids=["waited for", "observing"])
def test_an_exception_of_a_signal_handler_ends_the_run_with_a_checkpoint(observes, alarm):
    acting = Acting(alarm)
    with pytest.raises(TooLateError, match="time is up"):
        lockstep.train("CartPole-v1", nproc=2, callbacks=acting, observe_only=observes, name="late", **SETTINGS)
    run = lockstep.load_run("late")
    assert run.status == f"stopped by signal {signal.SIGTERM:d}"
    assert run.checkpoints[0].name == f"step_{run.summary['global_step']}"
    assert acting.told == [run.checkpoints[0].name, run.status]


def test_a_coroutine_is_interrupted_by_the_first_ctrl_c():
    acting = Acting(lambda: os.kill(os.getpid(), signal.SIGINT))
    caught = []

    async def main():
        try:
            lockstep.train("CartPole-v1", callbacks=acting, name="awaited", **{**SETTINGS, "total_steps": 2**17})
        except KeyboardInterrupt as error:
            caught.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    run = lockstep.load_run("awaited")
    assert len(caught) == 1
    assert acting.told == [run.checkpoints[0].name, run.status]
    assert run.status == f"stopped by signal {signal.SIGINT:d}"


@pytest.mark.started
@pytest.mark.parametrize(
    ("error", "number"), [(KeyboardInterrupt, signal.SIGINT), (SystemExit, signal.SIGTERM)], ids=["SIGINT", "SIGTERM"]
)
def test_a_caller_that_blocks_signals_ends_its_run_all_the_same(alarm, error, number):
    """As Ray does in its tasks, and programs that wait for signals: a process inherits it."""
    acting = Acting(lambda: alarm(error))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        with pytest.raises(error):
            lockstep.train("CartPole-v1", callbacks=acting, name="deaf", **{**SETTINGS, "total_steps": 2**17})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert lockstep.load_run("deaf").status == f"stopped by signal {number:d}"


IN_A_TASK = """
import asyncio, os, signal
import lockstep

class Interrupting:
    def on_iteration(self, record):
        if record["iteration"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

async def train():
    lockstep.train("CartPole-v1", callbacks=Interrupting(), name="task", num_steps=16, total_steps=2**17, quiet=True)

async def main():
    {inside}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "inside",
    ["await asyncio.gather(train(), asyncio.sleep(0))", "async with asyncio.TaskGroup() as g: g.create_task(train())"],
    ids=["gather", "task group"],
)
def test_a_task_of_a_coroutine_is_interrupted_by_the_first_ctrl_c(inside):
    """In a process of its own: tasks raise KeyboardInterrupt through the loop, and the loop's end does again."""
    done = subprocess.run([sys.executable, "-c", IN_A_TASK.format(inside=inside)], capture_output=True, check=False)
    assert done.stderr.decode().splitlines()[-1] == "KeyboardInterrupt"
    assert lockstep.load_run("task").status == f"stopped by signal {signal.SIGINT:d}"


def test_a_command_whose_output_can_not_be_read_is_stopped(monkeypatch):
    def none_left(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("lockstep.python.command._pump", none_left)
    with pytest.raises(RuntimeError, match="new thread"):
        lockstep.train("CartPole-v1", name="mute", **{**SETTINGS, "total_steps": 2**17})
    assert not Path("runs/mute").exists() or lockstep.load_run("mute").status != "finished"


def test_a_coroutine_that_was_cancelled_before_trains_to_the_end():
    async def main():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return lockstep.train("CartPole-v1", name="after", **{**SETTINGS, "total_steps": 256}).status

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert lockstep.load_run("after").status == "finished"


@pytest.mark.started
def test_a_caller_whose_python_stays_open_at_its_end_trains(monkeypatch):
    monkeypatch.setenv("PYTHONINSPECT", "1")
    assert lockstep.train("CartPole-v1", **{**SETTINGS, "total_steps": 256}).status == "finished"


LASTING = """
import pathlib, signal, time
came = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: came.append(number))
pathlib.Path("ready").touch()
while not came:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path("saved").touch()
"""
"""A command that ends some time after a signal."""
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["poll", "send_signal"])
@pytest.mark.parametrize(
    ("comes", "sent", "breaks"),
    [
        ([KeyboardInterrupt], [INT], 0),
        ([KeyboardInterrupt, KeyboardInterrupt], [INT, INT], 1),
        ([SystemExit], [TERM], 1),
        ([KeyboardInterrupt, TooLateError], [INT, TERM], 1),
        ([TooLateError, KeyboardInterrupt], [TERM, INT], 2),
        ([TooLateError, SystemExit, SystemExit], [TERM, TERM, TERM], 3),
    ],
)
def test_a_command_is_waited_for_wherever_exceptions_come(tmp_path, monkeypatch, where, comes, sent, breaks):
    """The first one comes while the caller listens, unless ``where`` is ``poll``; later ones ``where`` it says."""
    monkeypatch.setattr(command, "command_that_ends_with_us", lambda *_, **__: [sys.executable, "-c", LASTING])
    left, numbers, broken = [kind(str(place)) for place, kind in enumerate(comes)], [], []
    wanted = next((error for error in left if not isinstance(error, KeyboardInterrupt)), left[0])
    poll = subprocess.Popen.poll

    def come(place):
        if left and (tmp_path / "ready").exists() and place == where:
            raise left.pop(0)

    def polling(process):
        come("poll")
        return poll(process)

    def sending(process, number):
        numbers.append(number)
        os.kill(process.pid, number)
        come("send_signal")

    def meanwhile():
        time.sleep(0.01)
        if len(left) == len(comes):
            come("send_signal")

    monkeypatch.setattr(subprocess.Popen, "poll", polling)
    monkeypatch.setattr(subprocess.Popen, "send_signal", sending)
    with pytest.raises(type(wanted)) as caught:
        command.run_command(["train"], {}, True, meanwhile, broken.append)
    assert caught.value is wanted
    assert (tmp_path / "saved").exists()
    assert (numbers, len(broken)) == (sent, breaks)
