"""Commands that are forked are commands that were started: what they see, what they give, how they end."""

import json
import signal
import subprocess
import sys

import command_line
import pytest
from command_line import (
    NEEDS_PROC,
    SMALL,
    Run,
    command,
    lockstep,
    marked,
    run_words,
    running,
    start,
    surroundings,
    wait_until,
)
from forked_command import FORKS, ForkedCommand
from variants import variants

pytestmark = pytest.mark.skipif(not FORKS, reason="commands are forked on Linux only, and not if told otherwise")

SET_BY_MODULES_OF_THE_OTHER_ENGINE = {"KMP_DUPLICATE_LIB_OK", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"}

TELLS = """
import json, os, signal, sys
import gymnasium, psutil
seen = {
    "arguments": sys.argv[1:], "name": __name__, "main": sys.modules["__main__"].__spec__.name, "cwd": os.getcwd(),
    "path": sys.path, "own": os.environ.get("OWN"), "variables": sorted(os.environ),
    "shown": sorted(psutil.Process().environ()), "mark": psutil.Process().environ()["LOCKSTEP_TEST_MARKER"],
    "handles": sorted(int(name) for name in os.listdir("/proc/self/fd")), "input": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
}
json.dump(seen, open("seen.json", "w"))
print("said")
ENDING
gymnasium.register("Telling-v0", lambda: 1 / 0)
"""


def tell(cwd, ending=""):
    cwd.mkdir(exist_ok=True)
    (cwd / "tell_tale.py").write_text(TELLS.replace("ENDING", ending))
    return cwd


def seen_by(cwd, forked):
    words = ("train", "tell_tale:Telling-v0", *SMALL)
    ended = lockstep(*words, cwd=cwd, OWN="a ä") if forked else run_words(command(*words), cwd, OWN="a ä")
    seen = json.loads((cwd / "seen.json").read_text())
    assert seen.pop("mark") == ended.mark
    return ended, seen


def test_a_forked_command_sees_what_a_started_one_sees(tmp_path):
    cwd = tell(tmp_path)
    (one, theirs), (other, its) = seen_by(cwd, forked=False), seen_by(cwd, forked=True)
    room = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "COMMAND_SERVER_SPACE"}
    assert not room & set(its["variables"])
    assert {*its.pop("variables")} - {*theirs.pop("variables")} <= SET_BY_MODULES_OF_THE_OTHER_ENGINE
    assert its == theirs
    assert its["own"] == "a ä"
    assert (other.code, other.stdout, other.stderr) == (one.code, one.stdout, one.stderr)
    assert one.stdout == "said\n"


ENDINGS = [
    *("sys.exit(7)", "os._exit(9)", "raise SystemExit('why')", "raise KeyError('x')", "raise KeyboardInterrupt"),
    "os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.2, print, ['late']).start()",
    "import lockstep.cli; lockstep.cli.report_failure = None; os.kill(os.getpid(), signal.SIGINT)",
]


@pytest.mark.parametrize("ending", variants(ENDINGS, [ENDINGS[3], *ENDINGS[5:7]]))
def test_it_ends_as_a_started_one_does(tmp_path, ending):
    cwd = tell(tmp_path, ending)
    (one, _), (other, _) = seen_by(cwd, forked=False), seen_by(cwd, forked=True)
    assert other.code == one.code
    assert other.stdout == one.stdout
    assert other.stderr.splitlines()[-1:] == one.stderr.splitlines()[-1:]


@pytest.mark.parametrize("engine", variants(["torch", "jax"], ["torch"]))
def test_it_trains_the_same_agent(tmp_path, engine):
    words = ("train", "CartPole-v1", *SMALL, "--engine", engine, "--name")
    runs = [Run(tmp_path / "runs" / name, run([*words, name], tmp_path)) for name, run in (
        ("forked", lambda words, cwd: lockstep(*words, cwd=cwd)),
        ("started", lambda words, cwd: run_words(command(*words), cwd)),
    )]  # fmt: skip
    assert [run.ended.code for run in runs] == [0, 0]
    assert runs[0].agent == runs[1].agent
    assert runs[0].metrics == runs[1].metrics
    facts = [json.loads((run.path / "checkpoints" / "step_1024" / "state.json").read_text()) for run in runs]
    assert facts[0].get("machine") == facts[1].get("machine")


@NEEDS_PROC
def test_it_is_found_by_its_mark_and_so_is_what_it_forks_and_starts(tmp_path):
    forks = "os.fork() or signal.pause(); import subprocess; "
    started = f"subprocess.Popen([{sys.executable!r}, '-c', 'import signal; signal.pause()'], start_new_session=True)"
    cwd = tell(tmp_path, forks + started)
    with running("train", "tell_tale:Telling-v0", *SMALL, cwd=cwd) as (process, mark):
        assert isinstance(process, ForkedCommand)
        wait_until(lambda: len(set(marked(mark)) - {process.pid}) == 2, "the forked and the started")
    assert marked(mark) == []


def test_signals_reach_it(tmp_path):
    cwd = tell(tmp_path, "signal.pause()")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with running("train", "tell_tale:Telling-v0", *SMALL, cwd=cwd) as (process, _):
            wait_until((cwd / "seen.json").exists, "it has not begun")
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            process.send_signal(number)
            assert process.wait(600) == -number
        (cwd / "seen.json").unlink()


@pytest.mark.parametrize("more", [{"PYTHONHASHSEED": "1"}, {"OMP_NUM_THREADS": "2"}, {"JAX_ENABLE_X64": "1"}])
def test_what_counts_where_a_library_begins_is_started_from_nothing(tmp_path, more):
    process = start("--version", cwd=tmp_path, variables=surroundings("", more))
    assert isinstance(process, subprocess.Popen)
    assert process.communicate()[0].startswith("lockstep ")
    assert isinstance(start("--version", cwd=tmp_path, variables=surroundings("")), ForkedCommand)


def test_the_first_test_to_ask_for_a_command_decides_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    command_line._server.cache_clear()
    first = start("--version", cwd=tmp_path, variables=surroundings(""))
    assert isinstance(first, subprocess.Popen)
    first.communicate()
    monkeypatch.delenv("JAX_ENABLE_X64")
    second = start("--version", cwd=tmp_path, variables=surroundings(""))
    assert isinstance(second, ForkedCommand)
    second.communicate()


def test_many_at_once_end_with_their_own_codes(tmp_path):
    started = [start(*words, cwd=tmp_path, variables=surroundings("")) for words in [("--version",), ("no",)] * 10]
    assert [(process.communicate()[1] == "", process.returncode) for process in started] == [(True, 0), (False, 2)] * 10


def test_ranks_are_forked_without_a_word(tmp_path):
    words = ("train", "CartPole-v1", *SMALL, "--nproc", 2, "--name")
    forked, started = lockstep(*words, "forked", cwd=tmp_path), run_words(command(*words, "started"), tmp_path)
    assert (forked.code, forked.stderr) == (started.code, started.stderr) == (0, "")
    runs = [Run(tmp_path / "runs" / name, ended) for name, ended in (("forked", forked), ("started", started))]
    assert runs[0].agent == runs[1].agent
    assert runs[0].metrics == runs[1].metrics
