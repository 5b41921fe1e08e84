"""The run directory: made once, by one writer, whatever the world size."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lockstep.config import CheckpointConfig, Config, LogConfig
from lockstep.runs.checkpoint import CheckpointWriter, NullCheckpointWriter
from lockstep.runs.progress import NullProgress, Progress, make_progress
from lockstep.runs.tracker_jsonl import JsonlTracker, cut_jsonl
from lockstep.runs.trackers import METRICS_JSONL, NullTrackers, RunTrackers, TextTracker, cut_trackers
from lockstep.topology import Topology

CONFIG, SUMMARY, CHECKPOINTS, FINGERPRINTS = "config.json", "summary.json", "checkpoints", "fingerprints.jsonl"


@dataclass
class RunDirectory:
    """One run's directory, seen from one rank.

    Attributes:
        path: ``runs/<name>``.
        is_writer: whether this rank writes; on the others trackers, progress and checkpoints do nothing.
        quiet: whether progress is shown.
    """

    path: Path
    is_writer: bool = True
    quiet: bool = False
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / CHECKPOINTS

    def lock(self) -> None:
        """Make sure that no other process writes this run.

        Raises:
            ValueError: one does.
        """
        if not self.is_writer:
            return
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ValueError(f"run {self.path} is being written by another process; wait for it or stop it") from None
        self._lock = lock

    def unlock(self) -> None:
        """Let others write this run."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.path / ".lock").unlink()
            self._lock.close()
            self._lock = None

    def open_trackers(self, log: LogConfig) -> TextTracker:
        """The trackers that a config asks for."""
        if not self.is_writer:
            return NullTrackers()
        names = ("tensorboard",) if log.tensorboard else ()
        return RunTrackers(self.path, names, Path(log.jsonl) if log.jsonl else None)

    def open_progress(self, total_steps: int) -> Progress:
        """The progress display."""
        return make_progress(total_steps, self.quiet) if self.is_writer else NullProgress()

    def open_fingerprints(self) -> JsonlTracker | NullTrackers:
        """``fingerprints.jsonl``: every tensor's fingerprint at each iteration."""
        return JsonlTracker(self.path / FINGERPRINTS) if self.is_writer else NullTrackers()

    def open_checkpoints(self, config: CheckpointConfig) -> CheckpointWriter | NullCheckpointWriter:
        """The checkpoint writer."""
        if not self.is_writer:
            return NullCheckpointWriter()
        self.checkpoints.mkdir(exist_ok=True)
        return CheckpointWriter(self.checkpoints, config.keep_last, config.keep_best)

    def cut_logs(self, iteration: int, global_step: int, log: LogConfig) -> None:
        """Remove what was logged after a checkpoint, so that nothing stands twice."""
        if not self.is_writer:
            return
        cut_trackers(self.path, iteration, global_step, Path(log.jsonl) if log.jsonl else None)
        if (self.path / FINGERPRINTS).exists():
            cut_jsonl(self.path / FINGERPRINTS, iteration)

    def warn(self, text: str) -> None:
        """One warning on standard error, quiet or not."""
        if self.is_writer:
            print(f"lockstep: warning: {text}", file=sys.stderr, flush=True)

    def write_config(self, config: Config) -> None:
        """Write ``config.json``."""
        self._write_json(CONFIG, config.model_dump(mode="json"))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write_json(SUMMARY, summary)

    def _write_json(self, name: str, value: Any) -> None:
        if not self.is_writer:
            return
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(json.dumps(value, indent=2) + "\n")
            temporary.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None


def is_writer(topology: Topology) -> bool:
    """Whether this rank writes the run and speaks for it: one does."""
    return topology.rank == 0


def default_name(config: Config) -> str:
    """Environment, seed and time, e.g. ``CartPole-v1-seed0-20260131-120000``."""
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    return f"{env}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _untouched(path: Path) -> bool:
    """Whether a directory holds no more than a run that never got through its first iteration."""
    metrics = path / METRICS_JSONL
    trained = metrics.is_file() and metrics.stat().st_size > 0
    return (
        not trained
        and not any((path / CHECKPOINTS).glob("step_*"))
        and ((path / CONFIG).is_file() or not any(path.iterdir()))
    )


def create_run(runs_dir: str, name: str | None, config: Config) -> Path:
    """Make a run directory with its ``config.json``.

    Raises:
        ValueError: the name is taken, or the directory can't be written; one line.
    """
    path = Path(runs_dir) / (name or default_name(config))
    suffix = 1
    while name is None and path.exists():
        suffix += 1
        path = Path(runs_dir) / f"{default_name(config)}-{suffix}"
    if path.exists() and not (path.is_dir() and _untouched(path)):
        raise ValueError(
            f"name: run {path} exists already; --resume {path} continues it, another --name starts a new one"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_config(path, config)
    except OSError as error:
        raise ValueError(f"runs_dir: {path} can't be written: {error.strerror or error}") from None
    return path


def find_run(run: str, runs_dir: str = "runs") -> tuple[Path, str]:
    """The directory of a run given by name, path, or path of one of its checkpoints, and which checkpoint is meant.

    Raises:
        ValueError: there is no such run; the line names those that are there.
    """
    for path in (Path(run), Path(runs_dir) / run):
        if (path / CONFIG).is_file():
            return path, "latest"
        if path.parent.name == CHECKPOINTS and (path.parent.parent / CONFIG).is_file() and path.is_dir():
            return path.parent.parent, path.name
    there = sorted(p.parent.name for p in Path(runs_dir).glob(f"*/{CONFIG}"))[-5:]
    listed = f"; in {runs_dir} there are: {', '.join(there)}" if there else f"; {runs_dir} holds no runs"
    raise ValueError(f"run: neither {run} nor {Path(runs_dir) / run} is a run directory{listed}")


def write_config(path: Path, config: Config) -> None:
    """Write ``config.json`` unless another process is writing the run.

    Raises:
        ValueError: one is.
    """
    run = RunDirectory(path)
    run.lock()
    try:
        run.write_config(config)
    finally:
        run.unlock()
