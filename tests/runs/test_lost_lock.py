"""A run whose lock was removed takes it again, or ends before it writes beside who has it; who that is stands in it."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import CheckpointConfig, Config
from lockstep.core.errors import RunError
from lockstep.core.process import started_at
from lockstep.runs import directory
from lockstep.runs.checkpoint import to_files
from lockstep.runs.directory import RunDirectory
from lockstep.runs.lock import MOST_BYTES, holder_of
from lockstep.runs.making import create_run

HOLD = """
import pathlib, sys
from lockstep.runs.directory import RunDirectory
run = RunDirectory(pathlib.Path(sys.argv[1]))
run.lock()
{more}
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    run = create_run(str(tmp_path), "a", resolve(Config()))
    run.unlock()
    (run.path / "metrics.jsonl").touch()
    return run.path


@pytest.fixture
def holder(path):
    def start(more=""):
        words = [sys.executable, "-c", HOLD.format(more=more), str(path)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    started = []
    yield start
    for process in started:
        process.communicate()


def save(run, writer, step):
    writer.save(step, to_files({}, {}, {}), None)
    writer.wait()
    return sorted(each.name for each in run.checkpoints.glob("step_*"))


def test_the_lock_says_who_holds_it_and_so_does_the_refusal(path, holder):
    process = holder()
    signed = json.loads((path / ".lock").read_text())
    assert signed == {"host": socket.gethostname(), "pid": process.pid, "started": started_at(process.pid)}
    with pytest.raises(ValueError) as caught:
        RunDirectory(path).lock()
    who = f"another process, {process.pid} on {socket.gethostname()}"
    assert str(caught.value) == f"run {path} is being written by {who}; wait for it or stop it"


def test_the_launcher_is_named_while_a_rank_writes(path, holder):
    """It is whom to stop, and the rank leaves in the file what stands there."""
    process = holder("run.hand_over()")
    run = RunDirectory(path)
    run.take_over()
    assert json.loads((path / ".lock").read_text())["pid"] == process.pid
    run.check_lock()
    (path / ".lock").unlink()
    run.check_lock()
    assert json.loads((path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_was_left_behind_is_signed_anew(path):
    (path / ".lock").write_text("x" * 1000)
    run = RunDirectory(path)
    run.lock()
    assert json.loads((path / ".lock").read_text())["pid"] == os.getpid()
    run.unlock()
    assert not (path / ".lock").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"pid": null, "host": "a"}', "[" * MOST_BYTES, '{"pid": 1'])
def test_what_does_not_say_who_holds_it_is_another_process(path, content):
    (path / ".lock").write_text(content)
    assert holder_of(path / ".lock") == "another process"


def test_neither_a_link_nor_a_pipe_is_read_and_no_link_is_written_through(path):
    (path / "mine").write_text('{"pid": 1, "host": "a"}')
    (path / ".lock").symlink_to(path / "mine")
    assert holder_of(path / ".lock") == "another process"
    run = RunDirectory(path)
    run.lock()
    assert (path / "mine").read_text() == '{"pid": 1, "host": "a"}'
    run.unlock()
    os.mkfifo(path / ".lock")
    assert holder_of(path / ".lock") == "another process"


def test_a_run_whose_lock_was_removed_takes_it_again_and_keeps_others_out(path, capfd):
    run = RunDirectory(path)
    run.lock()
    writer = run.open_checkpoints(CheckpointConfig())
    assert save(run, writer, 1) == ["step_1"]
    (path / ".lock").unlink()
    assert save(run, writer, 2) == ["step_1", "step_2"]
    assert f"run {path}: its .lock was removed while it was being written; it is there again" in capfd.readouterr().err
    other = subprocess.run([sys.executable, "-c", HOLD.format(more=""), str(path)], capture_output=True, text=True)
    assert f"is being written by another process, {os.getpid()} on" in other.stderr
    run.unlock()
    assert not (path / ".lock").exists()
    run.lock()
    run.unlock()


def test_a_run_whose_directory_is_gone_is_no_matter_of_its_lock(path):
    run = RunDirectory(path)
    run.lock()
    shutil.rmtree(path)
    run.check_lock()
    run.unlock()


def test_who_has_taken_the_run_meanwhile_is_named_and_keeps_it(path, holder):
    run = RunDirectory(path)
    run.lock()
    writer = run.open_checkpoints(CheckpointConfig())
    (path / ".lock").unlink()
    process = holder()
    with pytest.raises(RunError, match=rf"another process, {process.pid} on .* has taken the run; this one ends here"):
        save(run, writer, 1)
    run.unlock()
    assert (path / ".lock").exists()


def test_the_rank_in_the_process_that_holds_the_run_takes_it_again_too(path):
    first, rank = RunDirectory(path), RunDirectory(path)
    first.lock()
    rank.take_over()
    writer = rank.open_checkpoints(CheckpointConfig())
    assert save(rank, writer, 1) == ["step_1"]
    (path / ".lock").unlink()
    assert save(rank, writer, 2) == ["step_1", "step_2"]
    first.unlock()
    assert not (path / ".lock").exists()


def test_a_rank_signs_where_its_launchers_lock_was_removed(path):
    run = RunDirectory(path)
    run.take_over()
    assert json.loads((path / ".lock").read_text())["pid"] == os.getpid()
    assert save(run, run.open_checkpoints(CheckpointConfig()), 1) == ["step_1"]


RANK = """
import pathlib, sys
from lockstep.runs.directory import RunDirectory
run = RunDirectory(pathlib.Path(sys.argv[1]))
run.take_over()
print("writes", flush=True)
for line in sys.stdin:
    run.check_lock()
    print("checked", flush=True)
"""


@pytest.fixture
def left(path):
    """A launcher whose rank took the run by a new lock, since the old one was removed, and has died."""
    run = RunDirectory(path)
    run.lock()
    run.hand_over()
    words = [sys.executable, "-c", RANK, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "writes\n"
        (path / ".lock").unlink()
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "checked\n"
        rank.kill()
    yield run
    run.unlock()


def test_a_launcher_has_the_run_before_it_starts_ranks_again(left, path):
    left.hold_on()
    words = [sys.executable, "-c", HOLD.format(more=""), str(path)]
    other = subprocess.run(words, capture_output=True, text=True)
    assert f"is being written by another process, {os.getpid()} on" in other.stderr
    words = [sys.executable, "-c", RANK, str(path)]
    rank = subprocess.run(words, input="\n", capture_output=True, text=True)
    assert rank.stdout == "writes\nchecked\n"
    left.unlock()
    assert not (path / ".lock").exists()


def test_a_launcher_starts_no_ranks_where_another_process_has_the_run_meanwhile(left, path, holder, monkeypatch):
    monkeypatch.setattr(directory, "PATIENCE", 0.1)
    process = holder("run.hand_over()")
    with pytest.raises(RunError, match=rf"another process, {process.pid} on .* has taken the run; this one ends here"):
        left.hold_on()
    left.unlock()
    assert (path / ".lock").exists()
