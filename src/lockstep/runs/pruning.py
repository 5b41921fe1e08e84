"""Removes old checkpoints; reads a checkpoint that was found whole again only if its files have changed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from lockstep.runs.checkpoint import MANIFEST, best_among, checkpoints_in, manifest_of, problem_with, score_in

HIDDEN = ".tmp"
"""Ends the names of directories of checkpoints that are being written or removed; they begin with a dot."""
Stamp = tuple[int, ...] | None
"""A file's metadata that changes with its content, name or kind; None if there is no such file."""


class Seen:
    """A checkpoint as it was when it was read.

    Attributes:
        manifest: None if it has no valid one, and so isn't ours to remove.
        score: in the manifest.
        is_planned: whether the config asked for the checkpoint at that time, rather than a session's end or the clock.
    """

    def __init__(self, path: Path) -> None:
        before = _stamps(path, [MANIFEST])  # before reading, so that a file that changes meanwhile counts as changed
        self.manifest = manifest_of(path)
        self.score = score_in(self.manifest)
        self.is_planned = self.manifest is not None and self.manifest.get("planned") is not False
        listed = list(self.manifest["files"]) if self.manifest else []
        self._path, self._files, self._stamps = path, [MANIFEST, *listed], before + _stamps(path, listed)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every file has the sha256 that the manifest gives."""
        return problem_with(self._path) is None

    def is_unchanged(self) -> bool:
        """Tells whether no file has changed since."""
        return self._stamps == _stamps(self._path, self._files)


def _stamps(path: Path, names: Sequence[str]) -> list[Stamp]:
    return [_stamp(f"{path}/{name}") for name in names]


def _stamp(path: str) -> Stamp:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint: all of it is gone at once, and a kill leaves at most a hidden directory for :func:`sweep`.

    Files that can't be removed stay in that directory as well.

    Raises:
        OSError: the checkpoint can't be removed, and is untouched.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}{HIDDEN}")
    shutil.rmtree(hidden, ignore_errors=True)  # of an earlier process with this number
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Removes checkpoints that a crash left half written or half removed."""
    for leftover in directory.glob(f".step_*{HIDDEN}"):
        shutil.rmtree(leftover, ignore_errors=True)


class Pruner:
    """Removes all checkpoints of a directory except for the newest ``keep_last`` whole ones and, if asked, the best.

    The newest ``keep_last`` planned ones stay as well, so that an interrupted run keeps those of an uninterrupted one.
    Damaged ones don't count as kept; those without a valid manifest stay. It is called after each save, and reads only
    what is new or has changed since.
    """

    def __init__(self, directory: Path, keep_last: int, keep_best: bool) -> None:
        self._directory, self._keep_last, self._keep_best = directory, keep_last, keep_best
        self._seen: dict[Path, Seen] = {}

    def __call__(self) -> None:
        """Removes the checkpoints that are too old by now."""
        found, before = checkpoints_in(self._directory), self._seen
        seen = {path: before[path] if path in before and before[path].is_unchanged() else Seen(path) for path in found}
        planned = [path for path in found if seen[path].is_planned]
        keep = {path for paths in (found, planned) for path in self._newest_whole(paths, seen)}
        if self._keep_best:
            keep |= {best_among({path: one.score for path, one in seen.items()})}
        self._seen = {path: seen[path] for path in found if path in keep or seen[path].manifest is None}
        for path in found:
            if path not in self._seen:
                with contextlib.suppress(OSError):
                    remove_checkpoint(path)

    def _newest_whole(self, paths: Sequence[Path], seen: Mapping[Path, Seen]) -> Iterator[Path]:
        return itertools.islice((path for path in paths if seen[path].is_whole), self._keep_last)
