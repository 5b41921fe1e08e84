"""Opens the run directory, which has one writer, whatever the world size."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.run import CheckpointConfig, Config, LogConfig
from lockstep.core.errors import RunError
from lockstep.core.files import try_json, write_json
from lockstep.core.process import say
from lockstep.core.topology import Topology, started_by_torchrun
from lockstep.runs.checkpoint import checkpoints_in, step_of
from lockstep.runs.checkpoint_writer import CheckpointWriter
from lockstep.runs.links import WANDB, odd_entry
from lockstep.runs.lock import PATIENCE, RunLock, holder_of, why_not_locked
from lockstep.runs.progress import Progress, make_progress
from lockstep.runs.trackers import (
    METRICS_CSV,
    METRICS_JSONL,
    OWN_FILES,
    TENSORBOARD,
    RunTrackers,
    cut_trackers,
    start_services,
    wanted_trackers,
)
from lockstep.runs.trackers.jsonl import JsonlTracker, cut_jsonl, iterations_of
from lockstep.runs.trackers.service import Tracker, close_all

CONFIG, SUMMARY, CHECKPOINTS, FINGERPRINTS = "config.json", "summary.json", "checkpoints", "fingerprints.jsonl"
TIMING, LOCK, VIDEOS = "timing.jsonl", ".lock", "videos"
REPORT, VERIFY = "report.html", "verify.json"
BEGUN = "begun"  # stands beside states in memory once what lies behind the one that a run goes on from is removed
KEPT_IN_MEMORY = 2  # states: one that is being written doesn't take the place of the last one
SEED = "seed_"  # and the seed: what the directory of one of several is called
FOLDERS = (CHECKPOINTS, TENSORBOARD, VIDEOS)
OWN_NAMES = {CONFIG, SUMMARY, CHECKPOINTS, FINGERPRINTS, TIMING, LOCK, VIDEOS, WANDB, REPORT, VERIFY, *OWN_FILES}


@dataclass
class RunDirectory:
    """One run's directory, seen from one rank: one that doesn't write has trackers and the like that do nothing.

    Attributes:
        memory: directory where states are kept for a launcher that starts ranks again; None: it doesn't.
        restarts: how often it has, a row each.
        audience: where somebody listens to the run's records.
        started: when this session began, ISO 8601 in UTC, ``command`` its command line and ``commit`` that of the git
            repository it was started in, where a launcher tells.
        commands: of the seeds of a group, the command line that trains each by itself.
    """

    path: Path
    is_writer: bool = True
    quiet: bool = False
    memory: Path | None = None
    restarts: tuple[dict[str, Any], ...] = ()
    audience: str | None = None
    started: str | None = None
    command: tuple[str, ...] | None = None
    commit: str | None = None
    commands: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    _lock: RunLock | None = field(default=None, repr=False)  # which unlock releases
    _taken: RunLock | None = field(default=None, repr=False)  # the launcher's, in the rank that writes
    _cwd: Path = field(default_factory=Path.cwd, repr=False)  # environments may change it
    _services: dict[str, Tracker] = field(default_factory=dict, repr=False)
    _lost: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def checkpoints(self) -> Path:
        """Names the folder of checkpoints."""
        return self.path / CHECKPOINTS

    def lock(self) -> None:
        """Make sure that no other process writes this run; a ``ValueError`` if one does."""
        if not self.is_writer:
            return
        lock = RunLock(self.path / LOCK)
        try:
            acquired = lock.acquire(PATIENCE if started_by_torchrun() else 0.0)  # those before it may be dying
        except OSError as error:
            raise ValueError(f"run {self.path} {why_not_locked(error)}") from None
        if not acquired:
            raise ValueError(f"run {self.path} {written_by_another(self.path)}")
        self._lock = lock

    def hand_over(self) -> None:
        """Leave the writing to a rank, which takes it over; the run stays this process's."""
        if self._lock is not None:
            self._lock.hand_over()

    def take_over(self) -> None:
        """Write this run from here on, for the process that holds it; a ``RunError`` if another one writes it."""
        if not self.is_writer:
            return
        lock = RunLock(self.path / LOCK)
        if not lock.take_over():
            raise RunError(f"run {self.path} {written_by_another(self.path)}")
        self._taken = lock

    def hold_on(self) -> None:
        """Make sure, once ranks have ended, that the run is still ours, before others are started or it is written.

        A rank that found the lock's file removed holds the new one alone, and leaves it to anybody when it ends.

        Raises:
            RunError: another process has the run meanwhile; one line.
        """
        self.check_lock(PATIENCE)
        self.hand_over()

    def check_lock(self, patience: float = 0.0) -> None:
        """Take the lock again where its file was removed; a ``RunError`` if another process has the run meanwhile.

        ``patience``: seconds that it may take to let it go.
        """
        lock = self._lock or self._taken
        if lock is None or not lock.is_lost():
            return
        try:
            again = lock.renew(patience)
        except FileNotFoundError:
            return  # the directory is gone, as is said where something is written
        if not again:
            raise RunError(
                f"run {self.path}: its {LOCK} was removed, and {holder_of(self.path / LOCK)} has taken the run; this "
                "one ends here, before it writes another checkpoint"
            )
        say(f"lockstep: warning: run {self.path}: its {LOCK} was removed while it was being written; it is there again")

    def unlock(self) -> None:
        """Let others write this run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove a directory that was made for a run which can't begin, if nothing but its config is there."""
        self.unlock()
        if {path.name for path in self.path.iterdir()} <= {CONFIG}:
            (self.path / CONFIG).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()  # not a link to a directory

    def start_services(self, config: Config, iteration: int) -> None:
        """Start the trackers that aren't files: they may refuse, and so comes before anything of the run is changed.

        ``iteration`` is the one that the run goes on from.
        """
        if self.is_writer:
            second, records = self._second(config.log), (FINGERPRINTS, TIMING)
            self._services = start_services(self.path, config, second, records, iteration)

    def close_services(self) -> None:
        """Close those that no trackers have taken over."""
        close_all(self._services)

    def open_trackers(self, config: Config) -> Tracker:
        """The trackers that a config asks for; services that are started already go on."""
        if not self.is_writer:
            return Tracker()
        extra, names = self._second(config.log), wanted_trackers(config.log)
        return RunTrackers(self.path, names, extra, config=config, started=self._services)

    def _second(self, log: LogConfig) -> Path | None:
        return self._cwd / log.jsonl if log.jsonl else None

    def video_path(self, global_step: int) -> Path | None:
        """Names the file of an evaluation's video; None on the ranks that don't write."""
        return self.path / VIDEOS / f"step_{global_step}.mp4" if self.is_writer else None

    def open_progress(self, total_steps: int, states: bool = True) -> Progress:
        """The progress display; see :func:`~lockstep.runs.progress.make_progress`."""
        return make_progress(total_steps, self.quiet, states=states) if self.is_writer else Progress()

    def open_records(self, name: str) -> Tracker:
        """:data:`FINGERPRINTS`, every tensor's at each iteration, or :data:`TIMING`, each rank's times and memory."""
        if not self.is_writer:
            return Tracker()
        if name in self._lost:
            self.warn(self._lost[name])
        return JsonlTracker(self.path / name)

    def open_checkpoints(self, config: CheckpointConfig) -> CheckpointWriter:
        """The checkpoint writer."""
        if self.is_writer:
            self.checkpoints.mkdir(exist_ok=True)
        directory = self.checkpoints if self.is_writer else None
        records = [self.path / name for name in (METRICS_JSONL, METRICS_CSV, FINGERPRINTS, TIMING)]
        return CheckpointWriter(directory, config.keep_last, config.keep_best, records, self.check_lock)

    def open_memory(self) -> CheckpointWriter | None:
        """Writes states in memory for the launcher, which starts ranks again from them; None where it doesn't."""
        if self.memory is None:
            return None
        return CheckpointWriter(self.memory if self.is_writer else None, KEPT_IN_MEMORY, keep_best=False)

    def missing_rows(self, iteration: int) -> list[tuple[int, int]]:
        """Which iterations up to this one have no row in ``metrics.jsonl``: the first and last of each stretch."""
        if not self.is_writer:
            return []
        found = sorted(n for n in iterations_of(self.path / METRICS_JSONL) if n <= iteration)
        return [(a + 1, b - 1) for a, b in itertools.pairwise([0, *found, iteration + 1]) if b - a > 1]

    def cut_after(self, iteration: int, global_step: int, log: LogConfig) -> None:
        """Remove checkpoints, videos and log lines after a point: the run that goes on from it has one future.

        Raises:
            RunError: a checkpoint or a video can't be removed; one line, and no log line was cut.
        """
        if not self.is_writer:
            return
        videos = _videos_after(self.path / VIDEOS, global_step)
        for path in checkpoints_in(self.checkpoints):
            if (step_of(path) or 0) > global_step:
                _remove(path)
        for path in videos:
            path.unlink(missing_ok=True)
        cut_trackers(self.path, iteration, global_step, self._second(log))
        for name in (FINGERPRINTS, TIMING):
            file = self.path / name
            last = max(cut_jsonl(file, iteration), default=0)
            if last < iteration and file.exists():  # to be said if it is gone on with
                self._lost[name] = f"{file} has no rows of iterations {last + 1} to {iteration}"
        if self.memory is not None:
            with contextlib.suppress(OSError):  # where it is gone, states are kept nowhere
                (self.memory / BEGUN).touch()

    def warn(self, text: str) -> None:
        """One warning on standard error, quiet or not."""
        if self.is_writer:
            say(f"lockstep: warning: {text}")

    def write_config(self, config: Config) -> None:
        """Write ``config.json``."""
        if self.is_writer:
            write_json(self.path / CONFIG, config.model_dump(mode="json"))

    def remove_summary(self) -> None:
        """Remove the summary of an earlier session: the run is not at its end any more."""
        if self.is_writer:
            (self.path / SUMMARY).unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        if self.is_writer:
            write_json(self.path / SUMMARY, summary)


def _videos_after(folder: Path, global_step: int) -> list[Path]:
    """Finds the videos after a point; a ``RunError`` if there are some that can't be removed."""
    steps = {path: path.stem.removeprefix("step_") for path in sorted(folder.glob("step_*.mp4"))}
    found = [path for path, step in steps.items() if step.isdecimal() and int(step) > global_step]
    if found:
        try:
            try_json(folder / "file", None)
        except OSError as error:
            raise _behind(found[0], error) from None
    return found


def _remove(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint, ignore_errors=True)
    if not checkpoint.exists():
        return
    try:
        shutil.rmtree(checkpoint)
    except OSError as error:
        raise _behind(checkpoint, error) from None


def _behind(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} comes after what the run goes on from and can't be removed ({error.strerror or error}); remove it, or "
        "copy the run to where you may write"
    )


def written_by_another(path: Path) -> str:
    """Says that a run is being written, by which process, and what to do, as the end of a line."""
    return f"is being written by {holder_of(path / LOCK)}; wait for it or stop it"


def is_writer(topology: Topology) -> bool:
    """Whether this rank writes the run and speaks for it: one does."""
    return topology.rank == 0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes what goes wrong with the file system in the block a ``ValueError`` of one line about ``path``."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"runs_dir: {path} can't be written: {error.strerror or error}") from None


def open_seed(run: RunDirectory, config: Config) -> RunDirectory:
    """The directory of one of a run's seeds, inside the run's own, with its ``config.json``; it comes back locked."""
    path, command = run.path / f"{SEED}{config.seed}", run.commands.get(config.seed)
    seed = RunDirectory(path, run.is_writer, quiet=True, started=run.started, command=command, commit=run.commit)
    if seed.is_writer:
        seed.path.mkdir()
    seed.lock()
    seed.write_config(config)
    return seed


def open_run(path: Path, config: Config, trust: bool = False, later: bool = False) -> RunDirectory:
    """A run that is resumed, its ``config.json`` brought up to date, or to be so ``later``; it comes back locked.

    Raises:
        ValueError: another process is writing it; it would be written through a link, and that isn't trusted; or a part
            of it can't be written. One line, and nothing of it has changed.
    """
    if not trust and (odd := odd_entry(path)) is not None:
        raise ValueError(f"run {path}: {odd}; if that is yours, give --trust")
    run = RunDirectory(path)
    run.lock()
    tried = CONFIG
    try:
        try_json(path / CONFIG, config.model_dump(mode="json"))
        for tried in FOLDERS:
            if (path / tried).is_dir() and (tried != VIDEOS or config.eval.record_video):
                try_json(path / tried / "file", None)
        tried = CONFIG
        if not later:
            run.write_config(config)
    except OSError as error:
        run.unlock()
        raise ValueError(f"run {path}: {tried} can't be written ({error.strerror or error})") from None
    return run
