"""Commands whose output nobody reads: the reader has left, the disk is full, or streams were closed from the start."""

import json
import os
import pty
import shlex
import subprocess
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import CARTPOLE, SMALL, TIMEOUT, command, surroundings

from lockstep.commands import doctor
from lockstep.launch.script import Script

FULL = Path("/dev/full")
DYING = ("train", "dying:DyingCartPole-v0", *SMALL, "--nproc", 2, "--name", "run")


def unread(*words, cwd, streams="12", **more):
    """The exit status of ``lockstep WORDS``, and what it says where somebody reads: not in these streams."""
    reading, writing = os.pipe()
    os.close(reading)
    out, err = (writing if number in streams else subprocess.PIPE for number in "12")
    variables = surroundings(uuid.uuid4().hex, {"PYTHONUNBUFFERED": "", **more})
    ended = subprocess.run(command(*words), cwd=cwd, env=variables, stdout=out, stderr=err, text=True, check=False)
    os.close(writing)
    return ended.returncode, (ended.stdout or "") + (ended.stderr or "")


def closed(*words, cwd, streams):
    """What ``lockstep WORDS`` comes to whose streams are closed, as the shell writes it: ``>&-``."""
    line = f"exec {shlex.join(command(*words))} {streams}"
    return subprocess.run(
        ["sh", "-c", line], cwd=cwd, env=surroundings(uuid.uuid4().hex), capture_output=True, text=True, check=False
    )


def summary(path):
    return json.loads((path / "runs" / "run" / "summary.json").read_text())


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_trains_to_its_end_though_nobody_reads(tmp_path, nproc):
    at = SMALL.index("--num-envs")
    words = ("train", "CartPole-v1", *SMALL[:at], *SMALL[at + 2 :], "--num-envs-per-rank", 8 // nproc, "--nproc", nproc)
    assert unread(*words, "--name", "run", cwd=tmp_path, PYTHONUNBUFFERED="1") == (0, "")
    assert summary(tmp_path)["status"] == "finished"


def test_a_run_that_fails_says_so_by_its_status(tmp_path):
    assert unread(*DYING, cwd=tmp_path, DIES_AT="72") == (1, "")


def test_a_run_that_is_refused_says_so_by_its_status(tmp_path):
    assert unread("train", "NoSuchEnv-v9", cwd=tmp_path) == (2, "")


def test_a_script_that_fails_says_so_by_its_status(tmp_path):
    (tmp_path / "bad.py").write_text("import sys; sys.exit(3)")
    assert unread("run", "--nproc", 2, "bad.py", cwd=tmp_path) == (1, "")


def test_what_the_doctor_finds_is_its_status(monkeypatch):
    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=broken, flush=lambda: None))
    found: Any = SimpleNamespace(to_json=dict, status=2)
    options: Any = SimpleNamespace(json="-")
    assert doctor._tell(options, Script("script.py"), found) == 2


@pytest.mark.parametrize(
    "words", [("--help",), ("list",), ("run", "--help"), ("train", "CartPole-v1", "--print-config")]
)
def test_what_only_prints_is_done_when_nobody_reads_on(tmp_path, words):
    assert unread(*words, cwd=tmp_path, streams="1") == (0, "")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [("list",), ("train", "CartPole-v1", "--print-config")])
def test_what_only_prints_fails_where_the_disk_is_full(tmp_path, words):
    with FULL.open("w") as full:
        ended = subprocess.run(
            command(*words),
            cwd=tmp_path,
            env=surroundings("full", {"PYTHONUNBUFFERED": ""}),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert ended.stderr == "lockstep: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("words", "streams"),
    [
        ((), ">&-"),
        (("--nproc", 2), ">&-"),
        (("--nproc", 2, "--quiet"), "<&- >&- 2>&-"),
        (("--max-restarts", 1), "2>&-"),
    ],
)
def test_a_run_trains_to_its_end_with_closed_streams(tmp_path, words, streams):
    ended = closed("train", *CARTPOLE, *words, "--name", "run", cwd=tmp_path, streams=streams)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert summary(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("words", [("--log.console", "full"), ("--eval.interval", 2, "--eval.episodes", 2)])
def test_a_run_trains_to_its_end_though_its_terminal_is_closed(tmp_path, words):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("train", *CARTPOLE, *words, "--name", "run"),
        cwd=tmp_path,
        env=surroundings(uuid.uuid4().hex, {"TERM": "xterm"}),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    os.read(ours, 1)  # the bar has begun
    os.close(ours)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (0, "")
    assert summary(tmp_path)["status"] == "finished"


def test_a_script_runs_with_closed_streams(tmp_path):
    (tmp_path / "good.py").write_text("print('a line'); open('done', 'w').close()")
    ended = closed("run", "good.py", cwd=tmp_path, streams=">&-")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert (tmp_path / "done").read_text() == ""
