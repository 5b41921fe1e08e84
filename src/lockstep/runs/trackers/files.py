"""Serves the trackers that write files: plain values, opening to continue, atomic replacement."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import numpy as np

from lockstep.core.files import sync_path
from lockstep.core.life import life

REWRITTEN = ".rewrite-"
"""Begins the names of files that are to take another's place."""


BUFFER_BYTES = 1 << 16
"""Holds the lines of several iterations, which reach a file by one write then."""

NUMBERS = frozenset({int, float})
"""Types, exactly, of what JSON and CSV write alike: as Python does."""

Row = TypeVar("Row")


def plain_value(value: Any) -> Any:
    """A metric as a plain Python value: NumPy scalars unwrapped, NaN and infinities as ``None``.

    JSON has no token for a number that isn't finite, and the three formats should agree on what is missing.
    """
    if type(value) is int:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PlainRecord(dict[str, Any]):
    """A metrics record of plain values; one that already is one stays it, so that several trackers share the work."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PlainRecord:
        """The record, every value made plain by :func:`plain_value`."""
        if isinstance(record, cls):
            return record
        return cls({key: x if type(x) is float and math.isfinite(x) else plain_value(x) for key, x in record.items()})

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The values as JSON: floats with every digit of a float64, which is most of the work of writing a record."""
        return tuple([repr(v) if type(v) in NUMBERS else json.dumps(v, allow_nan=False) for v in self.values()])

    @cached_property
    def cells(self) -> list[Any]:
        """The values for a CSV writer, which writes numbers as JSON does: those as text."""
        return [text if type(v) in NUMBERS else v for v, text in zip(self.values(), self.texts, strict=True)]


def read_through(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields rows of a file; each counts as progress, for other ranks wait while the writer of a run reads millions."""
    for row in rows:
        life.progressed()
        yield row


def open_to_append(path: Path) -> TextIO:
    """Open a text file of whole lines to write more of them; its directory is made when missing.

    Raises:
        ValueError: the file ends in half a line (a crash while writing), onto which the next line would be glued.
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                raise ValueError(
                    f"{path} ends in half a line: cut it to the last checkpoint first, or remove that line"
                )
    return path.open("a", BUFFER_BYTES, encoding="utf-8", newline="")


def check_writable(path: Path) -> None:
    """Raises an ``OSError`` where :func:`open_to_append` can't write; a pipe, say, is not opened to find out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch()
    elif not os.access(path, os.W_OK) or path.is_dir():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write the new content of an existing file; it takes the old one's place on leaving, whole or not at all."""
    path = path.resolve()  # behind a link, the file is replaced, not the link
    descriptor, temporary = tempfile.mkstemp(prefix=REWRITTEN, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_path(path.parent)
