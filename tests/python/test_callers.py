"""What a caller of ``lockstep.train`` is: its places of modules, a process of ``multiprocessing``, one that ends."""

import contextlib
import gc
import importlib
import io
import os
import pickle
import signal
import site
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from command_line import TIMEOUT, wait_until

import lockstep
from lockstep.python.command import UNTOLD, _places

SMALL = {"num_steps": 16, "total_steps": 256, "quiet": True}
SOURCE = str(Path(lockstep.__file__).parents[1])
MODULES = str(Path(__file__).parents[1] / "modules")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells that a parent died")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_places_of_installed_packages_are_each_processes_own(tmp_path, monkeypatch):
    """Of an environment beside the system's packages, say, which come after its own."""
    standard = os.path.dirname(os.__file__)
    names = ("mine", "own", "linked", "local", "system", "user", "added")
    mine, own, linked, local, system, user, added = (str(tmp_path / name) for name in names)
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(site, "getsitepackages", lambda: [own, local, system])
    monkeypatch.setattr(site, "getusersitepackages", lambda: user)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    path = ["", mine, str(tmp_path / "missing"), standard, user, own, linked, local, system, SOURCE, added]
    assert _places(path) == ([mine, SOURCE], [linked, SOURCE, added])
    assert _places([SOURCE, standard, own, added]) == ([SOURCE], [added])
    assert _places([own, mine]) == ([mine], [])  # of a path that somebody has made anew
    assert _places([standard, SOURCE + os.sep]) == ([SOURCE], [SOURCE])
    assert _places([standard, os.path.relpath(SOURCE), os.path.relpath(added)]) == ([SOURCE], [SOURCE, added])
    assert _places([os.path.relpath(mine), Path(own), standard]) == ([mine], [])  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert _places([standard, own, user]) == ([], [user])


def test_a_process_looks_at_the_places_of_its_caller_in_their_order(tmp_path):
    """In an environment that sees the packages of the Python that it was made from."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", "venv"], check=True, timeout=TIMEOUT
    )
    for name in ("first", "linked", "last"):
        (tmp_path / name).mkdir()
    packages = next(tmp_path.glob("venv/lib/python*/site-packages"))
    (packages / "linked.pth").write_text(f"{tmp_path / 'linked'}\n")
    search = "from lockstep.core.user_code import search_path; search_path.search_working_directory_last()"
    child = f"import sys; {search}; print(sys.path)"
    code = f"""
import os, subprocess, sys
from lockstep.python.command import PATH_VARIABLE, _places
sys.path[:] = [place for place in sys.path if place and os.path.exists(place)] + [{str(tmp_path / "last")!r}]
before, after = map(os.pathsep.join, _places(sys.path))
given = os.environ | {{"PYTHONPATH": before, PATH_VARIABLE: after}}
said = subprocess.run([sys.executable, "-P", "-c", {child!r}], env=given, capture_output=True, text=True, check=True)
found = [place for place in eval(said.stdout) if os.path.exists(place)]
assert found == [*sys.path, os.getcwd()], (found, sys.path)
print(len([place for place in found if place.endswith("-packages")]))
"""
    given = os.environ | {"PYTHONPATH": f"{tmp_path / 'first'}{os.pathsep}{SOURCE}"}
    done = subprocess.run(
        ["venv/bin/python", "-P", "-c", code], env=given, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2


@pytest.mark.started
def test_what_a_caller_looks_at_last_ranks_look_at_last(tmp_path, monkeypatch):
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "colorsys.py").write_text("raise ImportError('one of the standard library is wanted')\n")
    (tmp_path / "added" / "added_env.py").write_text(
        "import colorsys\nfrom handed_envs import Counting\n\n\nclass Added(Counting):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "added")])
    run = lockstep.train("added_env:Added", name="added", **SMALL)
    assert run.status == "finished"
    assert run.evaluate(1)["length_mean"] == 10


ELSEWHERE = """
import os
import lockstep
from packed.envs import Maze

os.chdir("sub")
run = lockstep.train(Maze, name="moved", num_steps=16, total_steps=256, quiet=True)
print(run.config.env.id, run.status, run.evaluate(1)["length_mean"])
"""


def test_an_object_is_found_from_another_directory_than_it_was_imported_in(tmp_path):
    """Where Python looks in the working directory, as with ``python -c`` and in a notebook."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "packed" / "envs.py").write_text(
        "from handed_envs import Counting\n\nclass Maze(Counting):\n    pass\n"
    )
    given = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, MODULES])}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=given, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.splitlines()[-1:] == ["packed.envs:Maze finished 10.0"], done.stderr


SPAWNING = """
import multiprocessing, sys
from handed_envs import Counting
from lockstep.core.user_code.handed import imported_name
from lockstep.python.handed import handed

class Env(Counting):
    def half(self):
        return Env(self.length // 2)

def work(_):
    given = handed("env.id", Env)
    return given.id, given.pickled, imported_name(Counting)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        name, content, imported = pool.map(work, [0])[0]
    sys.stdout.buffer.write(content or b"")
    print(name, imported, file=sys.stderr)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_what_a_script_defines_is_handed_over_from_a_process_of_multiprocessing(tmp_path, method):
    (tmp_path / "script.py").write_text(SPAWNING)
    given = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, MODULES])}
    done = subprocess.run([sys.executable, "script.py", method], env=given, capture_output=True, check=False)
    assert done.stderr.decode().split() == ["python:Env", "handed_envs:Counting"]
    assert pickle.loads(done.stdout)(12).half().length == 6


ENDING = """
import sys
import lockstep
env, nproc, stream = sys.argv[1], int(sys.argv[2]), sys.argv[3]
more = dict(env=dict(kwargs=dict(stream=stream))) if stream else {}
lockstep.train(env, nproc=nproc, total_steps=10**8, num_steps=16, name="ended", quiet=stream != "stdout",
               checkpoint=dict(interval=0), **more)
"""
LOUD = """
import sys
from handed_envs import Counting

class Loud(Counting):
    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def step(self, action):
        print("loud" * 1024, file=getattr(sys, self.stream), flush=True)  # 16 steps of 8 environments fill a pipe
        return super().step(action)
"""
HANGING = """
import os, signal, sys, time
from lockstep.python import orphaned
orphaned.PATIENCE = 0.3
signal.signal(signal.SIGTERM, lambda *_: None)
orphaned.end_with_caller(os.getppid())
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


@ON_LINUX
@pytest.mark.parametrize(
    ("env", "nproc", "stream", "number"),
    [
        ("lockstep/CartPole-v1", 1, "", signal.SIGTERM),
        ("loud:Loud", 1, "stderr", signal.SIGKILL),
        ("loud:Loud", 2, "stdout", signal.SIGKILL),
        pytest.param("loud:Loud", 2, "stderr", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("lockstep/CartPole-v1", 1, "", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_caller_that_ends_leaves_a_run_with_a_checkpoint(tmp_path, env, nproc, stream, number):
    """Also one whose environments print where nobody reads any more, on every rank."""
    (tmp_path / "loud.py").write_text(LOUD)
    given = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path), MODULES])}
    words, nowhere = [sys.executable, "-c", ENDING, env, str(nproc), stream], subprocess.DEVNULL
    with subprocess.Popen(words, env=given, stdout=nowhere, stderr=nowhere) as process:
        rows = tmp_path / "runs" / "ended" / "metrics.jsonl"
        try:
            wait_until(lambda: rows.exists() and rows.read_text().count("\n") > 2, "its first iterations")
        finally:
            process.send_signal(number)
        assert process.wait(60) == -number
    run = lockstep.load_run("ended")
    wait_until(lambda: run.status != "not finished", "the end of the run")
    assert run.status == f"stopped by signal {signal.SIGTERM:d}"
    assert [path.name for path in run.checkpoints] == [f"step_{run.metrics[-1]['global_step']}"]


class Unprintable(io.StringIO):
    """Somebody's own in the place of standard output, in which something is wrong."""

    def write(self, text, /):
        raise AttributeError("tee")


def test_lines_that_can_not_be_shown_are_lost_and_stop_no_run(tmp_path, monkeypatch):
    """More of them than a pipe holds."""
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "stdout", Unprintable())
    settings: dict[str, Any] = {
        "num_envs": 8,
        "num_steps": 16,
        "total_steps": 256,
        "env": {"kwargs": {"stream": "stdout"}},
    }
    run = lockstep.train("loud:Loud", name="lost", **settings)
    assert run.status == "finished"


CALLED = """
import multiprocessing, os, signal
from lockstep.python import orphaned
orphaned.end_with_caller(os.getppid())

def leaf():
    print("leaf ran", flush=True)

def child():
    forks.Process(target=leaf).start()  # by pipes of its own, with numbers that were our files'

forks = multiprocessing.get_context("fork")
one = forks.Process(target=child)
one.start()
one.join()
os.kill(os.getpid(), signal.SIGUSR2)  # a scheduler's, say
print("still heard", one.exitcode, flush=True)
"""


@ON_LINUX
def test_a_command_whose_caller_lives_is_heard_whatever_it_forks_and_is_sent():
    done = subprocess.run(
        [sys.executable, "-c", CALLED], env=os.environ | {"PYTHONPATH": SOURCE}, capture_output=True, text=True
    )
    assert (done.stderr, done.stdout.splitlines()) == ("", ["leaf ran", "still heard 0"])


@ON_LINUX
def test_what_hangs_is_killed_some_time_after_its_caller_has_ended():
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {HANGING!r}], start_new_session=True)
time.sleep(3600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCE}, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        hanging = int(caller.stdout.readline())
        caller.kill()
    wait_until(lambda: not Path(f"/proc/{hanging}/cmdline").exists() or zombie(hanging), "the end of what hangs")


def zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_call_leaves_nothing_open():
    class Watching:
        def on_iteration(self, record):
            return None

    gc.collect()  # what other tests left
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        for quiet in (True, False):
            run = lockstep.train("CartPole-v1", callbacks=Watching(), **{**SMALL, "quiet": quiet})
        assert run.evaluate(1)["episodes"] == 1
        gc.collect()
    assert [str(each.message) for each in said if each.category is ResourceWarning] == []


CLOSED = """
import os, sys
for number in range(3):
    os.close(number)
import lockstep
try:
    said = lockstep.train("CartPole-v1", num_steps=16, total_steps=128, quiet=True).status
except Exception as error:
    said = str(error)
open("said", "w").write(said)
"""


def test_a_caller_without_standard_streams_hears_how_a_command_ends(tmp_path):
    """What the command reported went to a descriptor that was its own output's, and the run was said to be killed."""
    subprocess.run([sys.executable, "-c", CLOSED], cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text() == "finished"


UNHEARD = """
import os, signal, sys, threading, time
import lockstep

def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.01)

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
else:
    threading.Thread(target=reap, daemon=True).start()

def said(call, *words, **settings):
    try:
        return call(*words, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

settings = dict(num_steps=16, total_steps=256, quiet=True)
run = said(lockstep.train, "CartPole-v1", name="good", **settings)
print(run.status)
for words in (("NoSuch-v1",), ("ending:raising",), ("ending:exiting",)):
    print(said(lockstep.train, *words, **settings))
print(said(run.export, torch="ending.py/policy.pt2"))
print(said(run.evaluate, 1, checkpoint=99))
"""
ENDING_EARLY = """
import os, signal
from handed_envs import Counting

class Raising(Counting):
    def step(self, action):
        raise RuntimeError("the arm is stuck")

def raising():
    return Raising()

def exiting():
    os._exit(0)
"""


@pytest.mark.parametrize("who", ["ignored", "reaped"])
def test_a_caller_who_cannot_know_how_children_end_hears_it(tmp_path, who):
    """Python takes 0 for the exit status of a child that somebody else has waited for."""
    (tmp_path / "ending.py").write_text(ENDING_EARLY)
    given = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path), MODULES])}
    done = subprocess.run(
        [sys.executable, "-c", UNHEARD, who], env=given, capture_output=True, text=True, timeout=TIMEOUT
    )
    good, missing, raising, exiting, export, evaluated = done.stdout.splitlines()
    assert good == "finished"
    assert missing.startswith("ValueError: env.id: no environment 'NoSuch-v1'")
    assert raising.startswith("RunError: ")
    assert "the arm is stuck" in raising
    assert exiting == f"RunError: {UNTOLD}"
    assert "ending.py" in export
    assert evaluated.startswith("ValueError: ")
    assert "no checkpoint of step 99" in evaluated
    assert [entry.name for entry in (tmp_path / "runs").iterdir() if (entry / "summary.json").exists()] == ["good"]


UNGUARDED = """
import os, sys
from handed_envs import Counting
import lockstep

with open("imports", "a") as file:
    print(os.getpid(), file=file)
if os.path.getsize("imports") > 100:
    os._exit(9)  # or it would never end

class Maze(Counting):
    pass

lockstep.train(sys.modules[__name__].Maze if __name__ == "maze" else "maze:Maze", num_steps=16, total_steps=256)
"""


@pytest.mark.parametrize(
    ("words", "processes"),
    [(["-c", "import maze"], 2), (["maze.py"], 2), (["-m", "lockstep", "train", "maze:Maze"], 1)],
)
def test_a_module_that_trains_when_it_is_imported_is_refused_at_once(tmp_path, words, processes):
    """Or the command that it starts would import it, and so start the next."""
    (tmp_path / "maze.py").write_text(UNGUARDED)
    given = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path), MODULES])}
    done = subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True, timeout=TIMEOUT)
    said = done.stderr.splitlines()[-1]
    assert "env.id: maze:Maze" in said
    assert said.endswith(
        "maze starts lockstep train while Lockstep imports it, which would begin again without end; put the call under "
        'if __name__ == "__main__":'
    )
    assert len(set((tmp_path / "imports").read_text().split())) == processes
    assert done.returncode != 0


def test_a_callback_may_import_what_trains(tmp_path, monkeypatch):
    (tmp_path / "second.py").write_text(
        f"import lockstep\nrun = lockstep.train('CartPole-v1', name='2nd', **{SMALL})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Importing:
        def on_end(self, run):
            self.run = importlib.import_module("second").run

    importing = Importing()
    lockstep.train("CartPole-v1", callbacks=importing, name="first", **SMALL)
    assert (importing.run.path.name, importing.run.status) == ("2nd", "finished")
