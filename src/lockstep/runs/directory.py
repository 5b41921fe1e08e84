"""Opens a run's directory and writes what is in it; a run has one writer, whatever the world size."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.run import CheckpointConfig, Config, LogConfig
from lockstep.core.done import Mark
from lockstep.core.errors import RunError
from lockstep.core.files import UNFINISHED, try_json, why_unwritten, write_json
from lockstep.core.process import say
from lockstep.core.topology import Topology, started_by_torchrun
from lockstep.runs.checkpoint import checkpoints_in, newest_manifest, step_of
from lockstep.runs.checkpoint_writer import CheckpointWriter
from lockstep.runs.links import SEED, WANDB, odd_entry
from lockstep.runs.lock import PATIENCE, RunLock, UnwritableError, holder_of, why_not_locked
from lockstep.runs.progress import Progress, make_progress
from lockstep.runs.pruning import remove_checkpoint
from lockstep.runs.session_facts import SessionFacts
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
from lockstep.runs.trackers.files import prepare_to_append
from lockstep.runs.trackers.jsonl import RecordFile, cut_jsonl, iterations_of
from lockstep.runs.trackers.service import Tracker, close_all

CONFIG, SUMMARY, CHECKPOINTS, FINGERPRINTS = "config.json", "summary.json", "checkpoints", "fingerprints.jsonl"
TIMING, LOCK, VIDEOS = "timing.jsonl", ".lock", "videos"
RECORDS = (METRICS_JSONL, METRICS_CSV, FINGERPRINTS, TIMING)  # a checkpoint counts on their rows
REPORT, VERIFY = "report.html", "verify.json"
KEPT_IN_MEMORY = 2  # states, so that the last one stays while the next is written
FOLDERS = (CHECKPOINTS, TENSORBOARD, VIDEOS)
OWN_NAMES = {CONFIG, SUMMARY, CHECKPOINTS, FINGERPRINTS, TIMING, LOCK, VIDEOS, WANDB, REPORT, VERIFY, *OWN_FILES}


@dataclass
class RunDirectory:
    """One run's directory, seen from one rank; on a rank that doesn't write, its trackers and writers do nothing.

    Attributes:
        memory: directory of the states from which a launcher restarts ranks; None if it doesn't restart them.
        begun: file by which that launcher learns that :meth:`cut_after` is over; None if nobody listens.
        facts: about this session.
    """

    path: Path
    is_writer: bool = True
    quiet: bool = False
    memory: Path | None = None
    begun: Path | None = None
    facts: SessionFacts = field(default_factory=SessionFacts)
    _lock: RunLock | None = field(default=None, repr=False)  # released by unlock
    _taken: RunLock | None = field(default=None, repr=False)  # the launcher's, in the rank that writes
    _services: dict[str, Tracker] = field(default_factory=dict, repr=False)
    _lost: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    def lock(self) -> None:
        """Locks the run for this process; raises a ``ValueError`` if another process writes it."""
        if not self.is_writer:
            return
        lock = RunLock(self.path / LOCK)
        try:
            acquired = lock.acquire(PATIENCE if started_by_torchrun() else 0.0)  # earlier ranks may still be dying
        except OSError as error:
            raise UnwritableError(f"run {self.path} {why_not_locked(error)}") from None
        if not acquired:
            raise ValueError(f"run {self.path} {written_by_another(self.path)}")
        self._lock = lock

    def hand_over(self) -> None:
        """Lets a rank :meth:`take_over` the writing; the run stays this process's."""
        if self._lock is not None:
            self._lock.hand_over()

    def take_over(self) -> None:
        """Takes over the writing from the process that holds the run; raises a ``RunError`` if another rank writes."""
        if not self.is_writer:
            return
        lock = RunLock(self.path / LOCK)
        if not lock.take_over():
            raise RunError(f"run {self.path} {written_by_another(self.path)}")
        self._taken = lock

    def hold_on(self) -> None:
        """Makes sure that the run is still ours after its ranks have ended, before it is written or restarted.

        If a rank found the lock file removed and took a new one, the run is free for anyone once that rank has ended.

        Raises:
            RunError: another process has taken the run meanwhile; one line.
        """
        self.check_lock(PATIENCE)
        self.hand_over()

    def check_lock(self, patience: float = 0.0) -> None:
        """Takes the lock again if its file was removed; raises a ``RunError`` if another process has the run meanwhile.

        ``patience``: seconds to wait for that process to release it.
        """
        lock = self._lock or self._taken
        if lock is None or not lock.is_lost():
            return
        try:
            again = lock.renew(patience)
        except FileNotFoundError:
            return  # the directory is gone; the next write says so
        if not again:
            raise RunError(
                f"run {self.path}: its {LOCK} was removed, and {holder_of(self.path / LOCK)} has taken the run; this "
                "one ends here, before it writes another checkpoint"
            )
        say(f"lockstep: warning: run {self.path}: its {LOCK} was removed while it was being written; it is there again")

    def unlock(self) -> None:
        """Releases the run, so that others can write it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Removes the directory of a run that can't begin, if it holds nothing but a config."""
        self.unlock()
        if {path.name for path in self.path.iterdir()} <= {CONFIG}:
            (self.path / CONFIG).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()  # not a link to a directory

    def start_services(self, config: Config, iteration: int) -> None:
        """Starts the tracking services; this comes before anything of the run is changed, because they may refuse.

        ``iteration``: the one that the run resumes from.
        """
        if self.is_writer:
            second, records = self._second(config.log), (FINGERPRINTS, TIMING)
            self._services = start_services(self.path, config, second, records, iteration)

    def close_services(self) -> None:
        """Closes the services that :meth:`open_trackers` hasn't taken over."""
        close_all(self._services)

    def open_trackers(self, config: Config, is_new: bool = False) -> Tracker:
        """Opens the trackers that a config asks for, of a run that begins if ``is_new``; takes over services."""
        if not self.is_writer:
            return Tracker()
        extra, names = self._second(config.log), wanted_trackers(config.log)
        return RunTrackers(self.path, names, extra, config=config, started=self._services, is_new=is_new)

    def _second(self, log: LogConfig) -> Path | None:
        return Path(log.jsonl) if log.jsonl else None  # absolute, so an environment may change the working directory

    def video_path(self, global_step: int) -> Path | None:
        """Returns the file for an evaluation's video; None on the ranks that don't write."""
        return self.path / VIDEOS / f"step_{global_step}.mp4" if self.is_writer else None

    def open_progress(self, total_steps: int, states: bool = True) -> Progress:
        """Opens the progress display; see :func:`~lockstep.runs.progress.make_progress`."""
        return make_progress(total_steps, self.quiet, states=states) if self.is_writer else Progress()

    def open_records(self, name: str) -> Tracker:
        """Opens :data:`FINGERPRINTS` (every tensor's at each iteration) or :data:`TIMING` (ranks' times and memory)."""
        if not self.is_writer:
            return Tracker()
        if name in self._lost:
            self.warn(self._lost[name])
        return RecordFile(self.path / name)

    def open_checkpoints(self, config: CheckpointConfig) -> CheckpointWriter:
        """Opens the checkpoint writer."""
        if self.is_writer:
            self.checkpoints.mkdir(exist_ok=True)
        directory = self.checkpoints if self.is_writer else None
        records = [self.path / name for name in RECORDS]
        return CheckpointWriter(directory, config.keep_last, config.keep_best, records, self.check_lock)

    def open_memory(self) -> CheckpointWriter | None:
        """Opens the writer of the states from which the launcher restarts ranks; None if it doesn't restart them."""
        if self.memory is None:
            return None
        return CheckpointWriter(self.memory if self.is_writer else None, KEPT_IN_MEMORY, keep_best=False)

    def missing_rows(self, iteration: int) -> list[tuple[int, int]]:
        """Returns the iterations up to this one without a row in ``metrics.jsonl``: each gap's first and last."""
        if not self.is_writer:
            return []
        found = sorted(n for n in iterations_of(self.path / METRICS_JSONL) if n <= iteration)
        return [(a + 1, b - 1) for a, b in itertools.pairwise([0, *found, iteration + 1]) if b - a > 1]

    def cut_after(self, iteration: int, global_step: int, log: LogConfig) -> None:
        """Removes checkpoints, videos and log lines after the point from which the run resumes.

        Raises:
            RunError: a checkpoint or a video can't be removed; one line, and no log line was cut.
        """
        if not self.is_writer:
            return
        videos = _videos_after(self.path / VIDEOS, global_step)
        for path in checkpoints_in(self.checkpoints):
            if (step_of(path) or 0) > global_step:
                _remove(path)
        unfinished = (self.path / VIDEOS).glob(f".step_*{UNFINISHED}.*")  # of a writer that was killed
        for path in (*videos, *unfinished):
            path.unlink(missing_ok=True)
        cut_trackers(self.path, iteration, global_step, self._second(log))
        for name in (FINGERPRINTS, TIMING):
            file = self.path / name
            last = max(cut_jsonl(file, iteration), default=0)
            if last < iteration and (file.exists() or _was_written(name, self.checkpoints)):  # open_records warns
                self._lost[name] = f"{file} has no rows of iterations {last + 1} to {iteration}"
        with contextlib.closing(Mark(self.begun)) as mark:
            mark.tell()

    def warn(self, text: str) -> None:
        """Prints a warning on standard error, even if the run is quiet."""
        if self.is_writer:
            say(f"lockstep: warning: {text}")

    def write_config(self, config: Config) -> None:
        """Writes ``config.json``."""
        if self.is_writer:
            write_json(self.path / CONFIG, config.model_dump(mode="json"))

    def remove_summary(self) -> None:
        """Removes the summary of an earlier session, because the run isn't at its end any more."""
        if self.is_writer:
            (self.path / SUMMARY).unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes ``summary.json``."""
        if self.is_writer:
            write_json(self.path / SUMMARY, summary)


def _videos_after(folder: Path, global_step: int) -> list[Path]:
    """Finds the videos after a step; raises a ``RunError`` if there are any and the folder can't be written."""
    steps = {path: path.stem.removeprefix("step_") for path in sorted(folder.glob("step_*.mp4"))}
    found = [path for path, step in steps.items() if step.isdecimal() and int(step) > global_step]
    if found:
        try:
            try_json(folder / "file", None)
        except OSError as error:
            raise _behind(found[0], error) from None
    return found


def _was_written(name: str, checkpoints: Path) -> bool:
    """Tells whether the session that wrote a run's newest checkpoint wrote the record of this name, too."""
    section, switch = ("proof", "trace") if name == FINGERPRINTS else ("log", "timing")
    config = (newest_manifest(checkpoints) or {}).get("config")
    settings = config.get(section) if isinstance(config, dict) else None
    return isinstance(settings, dict) and settings.get(switch) is True


def _remove(checkpoint: Path) -> None:
    try:
        remove_checkpoint(checkpoint)
    except OSError as error:
        raise _behind(checkpoint, error) from None


def _behind(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} comes after what the run goes on from and can't be removed ({error.strerror or error}); remove it, or "
        "copy the run to where you may write"
    )


def written_by_another(path: Path) -> str:
    """Ends a message with which process writes a run, and what to do."""
    return f"is being written by {holder_of(path / LOCK)}; wait for it or stop it"


def is_writer(topology: Topology) -> bool:
    """Tells whether this rank is the one that writes the run and prints its messages."""
    return topology.rank == 0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` in the block into a one-line ``ValueError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"runs_dir: {path} can't be written: {why_unwritten(error)}") from None


def open_seed(run: RunDirectory, config: Config) -> RunDirectory:
    """Makes the directory of one of a run's seeds, inside the run's, with its ``config.json``; returns it locked."""
    path, facts = run.path / f"{SEED}{config.seed}", run.facts.of_seed(config.seed)
    seed = RunDirectory(path, run.is_writer, quiet=True, facts=facts)
    if seed.is_writer:
        seed.path.mkdir()
    seed.lock()
    seed.write_config(config)
    return seed


def open_run(path: Path, config: Config, trust: bool = False, later: bool = False) -> RunDirectory:
    """Opens a run to resume it, and returns it locked; updates its ``config.json`` unless the caller does so ``later``.

    Raises:
        ValueError: another process is writing it; a link in it would be written through, without ``trust``; or a part
            of it can't be written. One line; the run is unchanged.
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
        for tried in _appended_to(config):
            if (path / tried).exists():
                prepare_to_append(path / tried)
        tried = CONFIG
        if not later:
            run.write_config(config)
    except OSError as error:
        run.unlock()
        advice = "free some space" if error.errno == errno.ENOSPC else "copy the run to where you may write"
        raise UnwritableError(f"run {path}: {tried} can't be written ({why_unwritten(error)}); {advice}") from None
    return run


def _appended_to(config: Config) -> list[str]:
    """Returns the names of the records that a run's sessions append to."""
    traced, timed = [FINGERPRINTS] * config.proof.trace, [TIMING] * config.log.timing
    return [METRICS_JSONL, METRICS_CSV, *traced, *timed]
