"""Writes checkpoints in the background; a rename commits each, so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.files import sync_path, why_unwritten, write_synced
from lockstep.core.life import life
from lockstep.runs.checkpoint import FORMAT, MANIFEST, CheckpointError, problem_with
from lockstep.runs.pruning import HIDDEN, Pruner, sweep


def commit(
    directory: Path, step: int, files: Mapping[str, bytes], score: float | None, facts: Mapping[str, Any] | None = None
) -> Path:
    """Writes a run's checkpoint unless it is there already, and returns its path; see :func:`write_directory`."""
    final = directory / f"step_{step}"
    if not final.exists() or problem_with(final) is not None:
        write_directory(final, files, {"step": step, "score": score, **(facts or {})})
    return final


def aside_of(final: Path) -> Path:
    """Returns where a directory waits while its successor takes its place; a crash at that moment leaves it there."""
    return final.parent / f".{final.name}.old"


def left_aside(folder: Path) -> list[Path]:
    """Lists the original paths of checkpoints that a crash left aside in a folder (:func:`aside_of`)."""
    return [path.with_name(path.name[1 : -len(".old")]) for path in sorted(folder.glob(".step_*.old"))]


def _put_back(final: Path, keep: Sequence[str]) -> None:
    """Moves a directory back from aside, with the entries in ``keep``, as far as the disk allows."""
    aside = aside_of(final)
    with contextlib.suppress(OSError):
        if final.exists():
            for name in keep:
                if (final / name).exists() and not (aside / name).exists():
                    (final / name).rename(aside / name)
            shutil.rmtree(final)
        aside.rename(final)


def write_directory(
    final: Path, files: Mapping[str, bytes], facts: Mapping[str, Any], keep: Iterable[str] = ()
) -> None:
    """Writes files and their manifest so that they are there whole or not at all: temporary directory, fsync, rename.

    Args:
        final: the directory; an existing one is replaced.
        files: contents by relative path.
        facts: what the manifest says besides.
        keep: names of entries that are kept from the replaced directory.

    Raises:
        CheckpointError: it can't be written; what was there is untouched.
    """
    temporary, keep, moved = final.parent / f".{final.name}.{os.getpid()}{HIDDEN}", list(keep), False
    try:
        if temporary.is_symlink():
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # fails if another process has made it
        folders = {(temporary / name).parent for name in files}
        for folder in folders - {temporary}:
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_synced(temporary / name, content)
            life.progressed()
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format": FORMAT, **facts, "files": hashes}
        write_synced(temporary / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for folder in folders | {temporary}:
            sync_path(folder)
        aside = aside_of(final)
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            next(final.iterdir(), None)  # a file in the way is an error, not replaced
            final.rename(aside)
            moved = True
        temporary.rename(final)
        for name in keep:
            (aside / name).rename(final / name)
        sync_path(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if moved:
            _put_back(final, keep)
        raise CheckpointError(
            f"checkpoint {final} can't be written: {why_unwritten(error)}; earlier checkpoints are untouched"
        ) from None


def sync_records(records: Sequence[Path]) -> None:
    """Syncs the log files that a checkpoint counts on; raises a ``CheckpointError``, also if the first is missing."""
    for place, path in enumerate(records):
        if place and not path.exists():
            continue
        try:
            sync_path(path)
        except OSError as error:
            raise CheckpointError(f"{path} can't be written: {error.strerror or error}; the run counts on it") from None


def _tidy(directory: Path) -> None:
    """Removes checkpoints that a crash left half written or half removed, and puts back those that it left aside."""
    sweep(directory)
    for final in left_aside(directory):
        if final.exists():
            shutil.rmtree(aside_of(final), ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                aside_of(final).rename(final)


class CheckpointWriter:
    """Commits checkpoints in a background thread, one at a time; the next call raises what failed.

    Args:
        directory: for the checkpoints; None on a rank that doesn't write: they are dropped.
        keep_last: how many of the newest stay, and how many of the newest planned ones.
        keep_best: whether the best stays too.
        records: log files that a checkpoint relies on, and that are synced to disk before it: the first must exist.
        check: is called before a checkpoint is written, and raises if this process may no longer write the run.

    Attributes:
        seconds: processor time that the last checkpoint took in the background.
    """

    def __init__(
        self,
        directory: Path | None,
        keep_last: int,
        keep_best: bool,
        records: Sequence[Path] = (),
        check: Callable[[], None] | None = None,
    ) -> None:
        self._directory, self._records, self._check = directory, records, check
        self._prune = None if directory is None else Pruner(directory, keep_last, keep_best)
        self._keep_last = keep_last
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        if directory is not None:
            _tidy(directory)

    def save(
        self, step: int, files: Mapping[str, bytes], score: float | None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Commits a checkpoint in the background, once the one before is done; ``facts`` go into its manifest."""
        self.wait()
        if self._directory is None or self._prune is None:
            return
        if self._check is not None:
            self._check()
        arguments = (self._directory, self._prune, step, files, score, facts)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint-writer")
        self._thread.start()

    def check_room(self, size: int) -> None:
        """Raises a ``CheckpointError`` if states of ``size`` bytes would take more than half of the free space."""
        if self._directory is None:
            return
        free, needed = shutil.disk_usage(self._directory).free, 2 * (self._keep_last + 1) * size
        if needed > free:
            raise CheckpointError(
                f"{size:,} bytes each, and {self._directory.parent} has {free:,} free, of {needed:,} wanted"
            )

    def _run(self, directory: Path, prune: Pruner, *checkpoint: Any) -> None:
        try:
            sync_records(self._records)
            commit(directory, *checkpoint)
            prune()
        except BaseException as error:
            self._error = error
        self.seconds = time.thread_time()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the checkpoint that is being written; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
