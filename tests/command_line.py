"""The ``lockstep`` command as the tests call it: in processes of its own, with a time limit, marked so as to be found."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 150
MODULES = Path(__file__).parent / "modules"
MARKER = "LOCKSTEP_TEST_MARKER"

SMALL = (
    "--num-envs 8 --num-steps 16 --total-steps 1024 --ppo.num-epochs 2 --ppo.num-minibatches 2 "
    "--ppo.learning-rate 1e-3 --ppo.gamma 0.98 --ppo.gae-lambda 0.8 --checkpoint.interval 2"
).split()
"""Eight iterations of 128 steps; everything that a preset sets, so that other ids of the same physics are equal."""


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
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in whole]


def surroundings(mark: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a command: no launcher's, and the modules of the tests importable."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith(("LOCKSTEP_", "TORCHELASTIC"))}
    return kept | {"PYTHONPATH": str(MODULES), MARKER: mark} | dict(more or {})


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "lockstep", *map(str, words)]


def run_words(words: Sequence[str], cwd: Path, timeout: float = TIMEOUT, **more: str) -> Ended:
    """Run any command line to its end."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        words, cwd=cwd, env=surroundings(mark, more), capture_output=True, text=True, timeout=timeout, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr, mark)


def lockstep(*words: Any, cwd: Path, timeout: float = TIMEOUT, **more: str) -> Ended:
    """Run ``lockstep WORDS`` to its end; ``more`` are environment variables."""
    return run_words(command(*words), cwd, timeout, **more)


def train(cwd: Path, *words: Any, name: str = "run", **more: str) -> Run:
    """``lockstep train WORDS`` that must end well."""
    ended = lockstep("train", *words, "--name", name, cwd=cwd, **more)
    assert ended.code == 0, ended.stderr
    return Run(cwd / "runs" / name, ended)


def resume(path: Path, *words: Any) -> Run:
    """``lockstep train --resume`` that must end well."""
    ended = lockstep("train", "--resume", path, *words, cwd=path.parent)
    assert ended.code == 0, ended.stderr
    return Run(path, ended)


def copy_of(run: Run, target: Path) -> Path:
    """A copy of a run directory to go on with."""
    return Path(shutil.copytree(run.path, target))


@contextmanager
def running(*words: Any, cwd: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``lockstep WORDS`` while it runs, and the mark of its processes; on leaving they are all gone."""
    mark = uuid.uuid4().hex
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command(*words), cwd=cwd, env=surroundings(mark, more), **pipes)
    try:
        yield process, mark
    finally:
        for pid in marked(mark):
            with_suppressed_kill(pid)
        process.communicate()


def with_suppressed_kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def ending(process: subprocess.Popen[str], mark: str) -> Ended:
    """How a command ends that is about to."""
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    return Ended(process.returncode, stdout, stderr, mark)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of a condition; fails when it doesn't come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"{what}: not within {seconds:g} s")


def marked(mark: str) -> list[int]:
    """Processes, alive, that a command started, by the variable that all of them inherit."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def assert_no_orphans(ended: Ended) -> None:
    """Nothing that a command started outlives it."""
    wait_until(lambda: not marked(ended.mark), "processes outlive their run", 15.0)


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
    """Training runs by their command line, each trained once for all tests that look at it."""
    root, done = tmp_path_factory.mktemp("trained"), {}

    def find(*words: Any) -> Run:
        if words not in done:
            done[words] = train(root, *words, name=f"run_{len(done)}")
        return done[words]

    return find
