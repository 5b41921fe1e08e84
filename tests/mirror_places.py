"""A mirror in memory that can fail at any operation, and small runs to put there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.runs.checkpoint import pack, to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import RunDirectory
from lockstep.runs.making import create_run
from lockstep.runs.mirror.copier import Mirror
from lockstep.runs.mirror.lease import Lease
from lockstep.runs.mirror.place import MirrorError, Place

CONFIG = resolve(Config(seed=3))


class MemoryPlace(Place):
    """A dictionary of files.

    Attributes:
        files: content by name.
        calls: what was done, in order.
        fails: decides by the number of an operation, and its kind, whether it fails.
        answers: whether what fails has had no effect; else only the answer is lost.
        after: is called after each operation.
    """

    def __init__(self) -> None:
        self.url = "memory://runs/run"
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.fails: Callable[[int, str], bool] = lambda number, kind: False
        self.answers = True
        self.after: Callable[[str, str], None] = lambda kind, name: None

    def _do(self, kind: str, name: str, action: Callable[[], object]) -> None:
        self.calls.append((kind, name))
        failed = self.fails(len(self.calls), kind)
        if not failed or not self.answers:
            action()
        self.after(kind, name)
        if failed:
            raise MirrorError(f"can't {kind} {self.url}: the cable is cut")

    def read(self, name: str) -> bytes | None:
        self._do("read", name, lambda: None)
        return self.files.get(name)

    def write(self, name: str, content: bytes) -> None:
        self._do("write", name, lambda: self.files.__setitem__(name, content))

    def create(self, name: str, content: bytes) -> bool:
        there = name in self.files
        self._do("write", name, lambda: self.files.setdefault(name, content))
        return not there

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._do("remove", name, lambda name=name: self.files.pop(name, None))

    def names(self) -> list[str]:
        self._do("list", "", lambda: None)
        return sorted(self.files)

    def changes(self) -> list[tuple[str, str]]:
        """What was written and removed, but for the lease."""
        return [call for call in self.calls if call[0] in ("write", "remove") and call[1] != "writer.json"]

    def steps(self) -> list[int]:
        """Checkpoints with a manifest."""
        names = list(self.files)  # at once: a thread may be copying
        found = (name.split("/") for name in names if name.endswith("/manifest.json"))
        return sorted(int(parts[1].removeprefix("step_")) for parts in found)


def problem_on(place: MemoryPlace) -> str | None:
    """Finds what would be wrong for whoever looked at the mirror just now; None: nothing."""
    steps = place.steps()
    rows = place.files.get("metrics.jsonl", b"").decode()
    if rows and not rows.endswith("\n"):
        return "half a row"
    if steps and "config.json" not in place.files:
        return "no config"
    if steps and max(steps) > len(rows.splitlines()):
        return f"step {max(steps)} and {len(rows.splitlines())} rows"
    for step in steps:
        folder = f"checkpoints/step_{step}"
        for name, digest in json.loads(place.files[f"{folder}/manifest.json"])["files"].items():
            content = place.files.get(f"{folder}/{name}")
            if content is None or hashlib.sha256(content).hexdigest() != digest:
                return f"{folder}/{name} is {'missing' if content is None else 'another'}"
    return None


def files_of(step: int, value: float = 0.0) -> dict[str, bytes]:
    """A checkpoint's files."""
    state = {"iteration": step, "global_step": step, "environment": {}}
    return to_files({"policy/w": np.full(3, step + value, np.float32)}, {0: pack({"x": np.ones(2)})}, state)


def add_step(run: Path, step: int, value: float = 0.0) -> Path:
    """Logs rows up to a step, then commits its checkpoint."""
    metrics = run / "metrics.jsonl"
    rows = metrics.read_text().count("\n") if metrics.is_file() else 0
    with metrics.open("a") as file:
        file.writelines(json.dumps({"iteration": n, "global_step": n}) + "\n" for n in range(rows + 1, step + 1))
    return commit(run / "checkpoints", step, files_of(step, value), None)


def make_run(runs_dir: Path, *steps: int, config: Config = CONFIG, name: str = "run") -> RunDirectory:
    """A run's directory with checkpoints."""
    run = create_run(str(runs_dir), name, config)
    run.unlock()
    for step in steps:
        add_step(run.path, step)
    return run


def mirror_of(run: Path, place: Place) -> Mirror:
    """A mirror whose lease is taken."""
    lease = Lease(place)
    lease.take()
    return Mirror(run, place, lease)


def content_of(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
