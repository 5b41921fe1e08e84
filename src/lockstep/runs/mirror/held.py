"""Keeps a checkpoint's files readable until they are copied, even if the run removes them meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lockstep.runs.checkpoint import MANIFEST, checkpoints_in, parsed_manifest, strange_name

MOST_BYTES = 1 << 26
"""Largest checkpoint that is held in memory; a larger one is held by hard links to its files."""


class Held(NamedTuple):
    """A checkpoint as it was when it was found.

    Attributes:
        path: where it was.
        manifest: the manifest's bytes.
        files: sha256 by relative path.
        contents: of the files that are held in memory.
        links: directory of hard links to the files; None if there are none, and files are read at ``path``.
    """

    path: Path
    manifest: bytes
    files: dict[str, str]
    contents: dict[str, bytes]
    links: Path | None = None

    def read(self, name: str) -> bytes:
        """Returns a file's content.

        Raises:
            FileNotFoundError: it was removed.
        """
        if name in self.contents:
            return self.contents[name]
        if self.links is not None:
            with contextlib.suppress(FileNotFoundError):  # starting ranks tidy links up
                return (self.links / name).read_bytes()
        return (self.path / name).read_bytes()


def found(path: Path) -> Held | None:
    """Reads a checkpoint's manifest, and holds no file; None if there is no valid one, or it is removed meanwhile."""
    file = path / MANIFEST
    if file.is_symlink() or not file.is_file():
        return None
    with contextlib.suppress(FileNotFoundError):
        manifest = parsed_manifest(text := file.read_bytes())
        if manifest is not None and strange_name(manifest) is None:
            return Held(path, text, manifest["files"], {})
    return None


@contextlib.contextmanager
def holding(directory: Path, known: Mapping[str, bytes]) -> Iterator[tuple[list[Path], Held | None]]:
    """Lists a run's checkpoints, newest first, and holds the newest valid one while the block runs.

    If the newest is removed before it can be held, there is a newer one, and the search starts again.

    Args:
        directory: of the checkpoints.
        known: manifests, by checkpoint name, of those that needn't be held.

    Yields:
        The checkpoints' paths, and the newest valid one; None if there is none.
    """
    newest = None
    try:
        while True:
            listed = checkpoints_in(directory)
            newest = next(filter(None, (_held(path, known) for path in listed)), None)
            is_first = newest is not None and newest.path == listed[0]
            if is_first or checkpoints_in(directory) == listed:
                break
            _let_go(newest)
        yield listed, newest
    finally:
        _let_go(newest)


def _let_go(one: Held | None) -> None:
    if one is not None and one.links is not None:
        shutil.rmtree(one.links, ignore_errors=True)


def _held(path: Path, known: Mapping[str, bytes]) -> Held | None:
    """Holds a checkpoint: by hard links if it is large and links are supported, else in memory; None if incomplete."""
    one = found(path)
    if one is None or known.get(path.name) == one.manifest:
        return one
    try:
        if sum((path / name).stat().st_size for name in one.files) > MOST_BYTES:
            with contextlib.suppress(OSError):
                return one._replace(links=_linked(one))
        return one._replace(contents={name: (path / name).read_bytes() for name in one.files})
    except FileNotFoundError:
        return None


def _linked(one: Held) -> Path:
    links = one.path.parent / f".{one.path.name}.mirror.tmp"  # the run's writer also removes this name
    shutil.rmtree(links, ignore_errors=True)
    try:
        for name in one.files:
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(one.path / name, links / name)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        raise
    return links
