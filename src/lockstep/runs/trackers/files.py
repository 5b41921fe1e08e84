"""Gives the trackers that write files plain values, files opened to append, and atomic replacement."""

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
"""Prefix of temporary files that are going to replace another."""


BUFFER_BYTES = 1 << 16
"""Buffer for the lines of several iterations, so that one write sends them to the file."""

NUMBERS = frozenset({int, float})
"""The exact types of values that JSON and CSV write alike, as Python's ``repr`` does."""

Row = TypeVar("Row")


def plain_value(value: Any) -> Any:
    """Returns a metric as a plain Python value: unwraps NumPy scalars, and turns NaN and infinities into ``None``.

    JSON has no token for a number that isn't finite, and all file formats should agree on what is missing.
    """
    if type(value) is int:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PlainRecord(dict[str, Any]):
    """A metrics record of plain values, which is made once and shared by all trackers."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PlainRecord:
        """Makes every value of a record plain by :func:`plain_value`; returns a plain record itself."""
        if isinstance(record, cls):
            return record
        return cls({key: x if type(x) is float and math.isfinite(x) else plain_value(x) for key, x in record.items()})

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The values as JSON, floats with every digit of a float64; cached, because this is most of the work."""
        return tuple([repr(v) if type(v) in NUMBERS else json.dumps(v, allow_nan=False) for v in self.values()])

    @cached_property
    def cells(self) -> list[Any]:
        """The values for a CSV writer; numbers are those of :attr:`texts`, because both formats write them alike."""
        return [text if type(v) in NUMBERS else v for v, text in zip(self.values(), self.texts, strict=True)]


def read_through(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields rows and reports progress at each, because other ranks wait while the run's writer reads millions."""
    for row in rows:
        life.progressed()
        yield row


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to append whole lines; makes its directory if that is missing.

    Raises:
        ValueError: the file ends in half a line, as a crash leaves it, to which the next line would be appended.
        OSError: the file can't be opened.
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


def prepare_to_append(path: Path) -> None:
    """Makes a file, empty, and its directory if they are missing; one that is there stays closed: it may be a pipe.

    Raises:
        OSError: :func:`open_to_append` couldn't write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch()
    elif not os.access(path, os.W_OK) or path.is_dir():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file for a file's new content; on exit it replaces the file, wholly or not at all.

    Raises:
        OSError: the new content can't be written; it names ``path``.
    """
    path = path.resolve()  # replaces the file behind a link, not the link
    descriptor, temporary = tempfile.mkstemp(prefix=REWRITTEN, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # of a write: the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_path(path.parent)
