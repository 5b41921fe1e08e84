"""The ``lockstep`` command as the tests call it: in processes of its own, with a time limit and a mark to find them."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_server import OPTIMIZATIONS
from forked_command import FORKS, ForkedCommand, Server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell starts behind itself has it so, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)

TIMEOUT = 600
"""Seconds after which a command hangs."""
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at processes through /proc")
MODULES = Path(__file__).parent / "modules"
MARKER = "LOCKSTEP_TEST_MARKER"

SMALL = (
    *("--num-envs", 8, "--num-steps", 16, "--total-steps", 1024, "--ppo.num-epochs", 4, "--ppo.num-minibatches", 2),
    *("--ppo.learning-rate", 5e-3, "--ppo.gamma", 0.98, "--ppo.gae-lambda", 0.8, "--ppo.value-coef", 1.0),
    *("--checkpoint.interval", 3),
)
"""Eight iterations of 128 steps; everything that a preset sets, so that other ids of the same physics are equal."""

CARTPOLE = ("CartPole-v1", *SMALL)
EVALUATED = (*CARTPOLE, "--eval.interval", 4)
GATED = ("gated:GatedCartPole-v0", *SMALL)


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit status, what it printed, and the mark that its processes carried."""

    code: int
    stdout: str
    stderr: str
    mark: str


@dataclass(frozen=True)
class Run:
    """A run directory, and the command that made it or went on with it."""

    path: Path
    ended: Ended

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return metrics_of(self.path)

    @property
    def agent(self) -> tuple[str, str]:
        """What two runs of the same config must share."""
        return self.summary["params_sha256"], self.summary["state_sha256"]


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """``metrics.jsonl`` without what the clock says."""
    file = path / "metrics.jsonl"
    whole = (
        [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in whole]


def surroundings(
    mark: str, more: Mapping[str, str] | None = None, ours: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment variables of a command: no launcher's, and the modules of the tests importable."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in ours.items() if k not in launcher and not k.startswith(("LOCKSTEP_", "TORCHELASTIC"))}
    paths = os.pathsep.join([str(MODULES), *filter(None, [ours.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": paths, MARKER: mark} | dict(more or {})


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "lockstep", *map(str, words)]


_before_tests: dict[str, str] = {}


def remember_variables() -> None:
    """Keeps the variables of now, before any test: the first to ask for a command may have set some of its own."""
    _before_tests.update(os.environ)


@cache
def _server(_pid: int) -> Server:
    return Server(surroundings("no command", ours=_before_tests or os.environ))


def start(
    *words: Any, cwd: Path, variables: Mapping[str, str], new_session: bool = False
) -> "subprocess.Popen[str] | ForkedCommand":
    """Start ``lockstep WORDS``: forked from a process that has imported everything, where that can be."""
    if FORKS:
        server = _server(os.getpid())
        if server.can_fork(variables):
            return ForkedCommand(server, list(map(str, words)), cwd, variables, new_session)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(*words), cwd=cwd, env=variables, start_new_session=new_session, stdout=pipe, stderr=pipe, text=True
    )


def run_words(words: Sequence[str], cwd: Path, **more: str) -> Ended:
    """Run any command line to its end, started from nothing; ``more`` are environment variables."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        words, cwd=cwd, env=surroundings(mark, more), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr, mark)


def lockstep(*words: Any, cwd: Path, **more: str) -> Ended:
    """Run ``lockstep WORDS`` to its end, see :func:`start`; ``more`` are environment variables."""
    mark = uuid.uuid4().hex
    process = start(*words, cwd=cwd, variables=surroundings(mark, more))
    try:
        return ending(process, mark)
    except BaseException:
        process.send_signal(signal.SIGKILL)
        raise


def train(cwd: Path, *words: Any, name: str = "run") -> Run:
    """``lockstep train WORDS`` that must end well."""
    ended = lockstep("train", *words, "--name", name, cwd=cwd)
    assert ended.code == 0, ended.stderr
    return Run(cwd / "runs" / name, ended)


def resume(path: Path, *words: Any, **more: str) -> Run:
    """``lockstep train --resume`` that must end well; ``more`` are environment variables."""
    ended = lockstep("train", "--resume", path, *words, cwd=path.parent, **more)
    assert ended.code == 0, ended.stderr
    return Run(path, ended)


def copy_of(run: Run, target: Path) -> Path:
    """A copy of a run directory to go on with."""
    return Path(shutil.copytree(run.path, target))


@contextmanager
def running(*words: Any, cwd: Path, **more: str) -> Iterator[tuple["subprocess.Popen[str] | ForkedCommand", str]]:
    """``lockstep WORDS`` while it runs, and the mark of its processes; on leaving they are all gone."""
    mark = uuid.uuid4().hex
    process = start(*words, cwd=cwd, variables=surroundings(mark, more), new_session=True)
    try:
        yield process, mark
    finally:
        process.send_signal(signal.SIGKILL)  # which may not carry its mark yet
        wait_until(lambda: killed(process, mark), "processes outlive being killed")


def killed(process: "subprocess.Popen[str] | ForkedCommand", mark: str) -> bool:
    """Kills all processes of a command; whether none was left, not even one that another had just started."""
    pids = marked(mark)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.communicate(timeout=0.1)
    except subprocess.TimeoutExpired:
        return False
    return not pids


def ending(process: "subprocess.Popen[str] | ForkedCommand", mark: str) -> Ended:
    """How a command ends that is about to."""
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode is not None
    return Ended(process.returncode, stdout, stderr, mark)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = TIMEOUT) -> Any:
    """The first true value of a condition; fails when it doesn't come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"{what}: not within {seconds:g} s")


def marked(mark: str, *variables: str) -> list[int]:
    """Processes, alive, that a command started, by the variable they all inherit, and by others (``RANK=1``)."""
    found, wanted = [], {f"{MARKER}={mark}".encode(), *(v.encode() for v in variables)}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def ranks_of(mark: str, rank: int) -> list[int]:
    """The process of a rank that a command started, by the name it gives itself."""
    found = []
    for pid in marked(mark):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"lockstep rank {rank}\n":
                found.append(pid)
    return found


def assert_no_orphans(ended: Ended) -> None:
    """Nothing that a command started outlives it."""
    wait_until(lambda: not marked(ended.mark), "processes outlive their run", 60.0)


def same(a: Run, b: Run) -> None:
    """The same agent by the same way: parameters, optimiser state and every metric of every iteration."""
    assert a.agent == b.agent
    assert len(a.metrics) == 8
    assert a.metrics == b.metrics


def error_line(ended: Ended) -> str:
    """The one line on standard error of a command that failed as a command should."""
    assert ended.code not in (0, None), ended.stdout
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("lockstep: error: "), ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    return lines[0]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Training runs by their command line, each trained once for all tests and all pytest workers that look at it."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    root.mkdir(exist_ok=True)

    def find(*words: Any) -> Run:
        compiled = [os.environ.get(name) for name in (OPTIMIZATIONS, "XLA_FLAGS")]
        name = hashlib.sha256(repr((words, compiled)).encode()).hexdigest()[:8]
        told = root / f"{name}.json"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if told.is_file():
                return Run(root / "runs" / name, Ended(**json.loads(told.read_text())))
            shutil.rmtree(root / "runs" / name, ignore_errors=True)
            run = train(root, *words, name=name)
            told.write_text(json.dumps(asdict(run.ended)))
            return run

    return find
