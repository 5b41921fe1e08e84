"""``lockstep run``: somebody's own script on several ranks, by its command line."""

import json
import os
import signal
import sys

import pytest
from command_line import (
    NEEDS_PROC,
    assert_no_orphans,
    ending,
    error_line,
    lockstep,
    marked,
    run_words,
    running,
    wait_until,
)

SCRIPT = """
import json, os, sys, time
from pathlib import Path
here, wish = Path(sys.argv[1]), sys.argv[2:]
place = {name: os.environ.get(name) for name in
         ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")}
told = place | {"name": __name__, "argv": sys.argv, "path": sys.path[0]}
(here / f"{place['RANK']}.json").write_text(json.dumps(told))
if "fail" in wish and place["RANK"] == "1":
    (here / "failing").write_text(str(os.getpid()))
    sys.exit(7)
if "follow" in wish:
    failing = lambda: (here / "failing").read_text() if (here / "failing").exists() else ""
    while not failing() or Path("/proc", failing()).exists():  # until somebody has seen how it ended
        time.sleep(0.01)
    sys.exit(8)
if "stay" in wish or "fail" in wish:
    time.sleep(3600)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def told(path, ranks=2):
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_are_told_their_place_as_torchrun_tells_it(script):
    ended = lockstep("run", "--nproc", 2, "script.py", script, "--nproc", 3, "--", "x", cwd=script)
    assert ended.code == 0, ended.stderr
    for rank, facts in enumerate(told(script)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert facts.items() >= (place | {"MASTER_ADDR": "127.0.0.1", "name": "__main__"}).items()
        assert facts["argv"] == ["script.py", str(script), "--nproc", "3", "--", "x"]
        assert facts["path"] == str(script)
        assert facts["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert len({facts["MASTER_PORT"] for facts in told(script)}) == 1


@pytest.mark.parametrize("words", [("-m", "script"), ("--", "-m", "script")])
def test_a_module_runs_as_python_runs_it(script, words):
    ended = lockstep("run", *words, script, cwd=script)
    assert ended.code == 0, ended.stderr
    (facts,) = told(script, 1)
    assert facts["argv"] == [str(script / "script.py"), str(script)]
    assert facts["WORLD_SIZE"] == "1"


@NEEDS_PROC
def test_a_rank_that_fails_ends_all_and_is_named(script):
    ended = lockstep("run", "--nproc", 2, "script.py", script, "fail", cwd=script)
    assert ended.code == 1
    assert error_line(ended) == "lockstep: error: rank 1 ended with exit code 7"
    assert_no_orphans(ended)


@NEEDS_PROC
def test_of_two_ranks_that_fail_the_first_is_named(script):
    ended = lockstep("run", "--nproc", 2, "script.py", script, "fail", "follow", cwd=script)
    assert error_line(ended) == "lockstep: error: rank 1 ended with exit code 7"


@NEEDS_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_ranks_and_none_outlives_its_parent(script, number):
    with running("run", "--nproc", 2, "script.py", script, "stay", cwd=script) as (process, mark):
        wait_until(lambda: (script / "1.json").is_file() and (script / "0.json").is_file(), "the ranks don't start")
        assert len(marked(mark, "LOCAL_WORLD_SIZE=2")) == 2
        process.send_signal(number)
        wait_until(lambda: not marked(mark), "ranks outlive the signal")
        ended = ending(process, mark)
    if number == signal.SIGTERM:
        assert ended.code == 128 + number
        assert error_line(ended) == "lockstep: error: stopped by a signal"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no script given"),
        (("absent.py",), "there is no file 'absent.py'"),
        (("-m", "absent_module"), "'absent_module' isn't importable"),
        (("--nproc", "0", "script.py"), "nproc: 0 is below 1"),
        (("--procs", "2", "script.py"), "--procs"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(script, words, message):
    ended = lockstep("run", *words, cwd=script)
    assert ended.code == 2
    assert message in error_line(ended)


def test_inside_a_launcher_no_ranks_are_started(script):
    ended = lockstep("run", "--nproc", 2, "script.py", cwd=script, RANK="1", WORLD_SIZE="4")
    assert ended.code == 2
    assert "rank 1 of 4" in error_line(ended)


def test_without_pytorch_ranks_are_plain_processes(script):
    """As on a machine with JAX alone: a module of that name that isn't found."""
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
        "from lockstep.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
    )
    ended = run_words([sys.executable, "-c", code, "run", "--nproc", "2", "script.py", str(script)], script)
    assert (ended.code, ended.stdout) == (0, "False\n"), ended.stderr
    assert [facts["RANK"] for facts in told(script)] == ["0", "1"]
