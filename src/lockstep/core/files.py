"""Writes files whole or not at all, even if the power fails."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""Flags that create a file and fail if it exists."""
UNFINISHED = ".unfinished"
"""In the names of files that :func:`draft_of` makes; a process that is killed leaves them."""


class UnwrittenError(OSError):
    """A file, ``filename``, can't be written; the message is one line that names it and says why."""

    def __str__(self) -> str:
        """Returns the message."""
        return f"{self.filename} can't be written: {why_unwritten(self)}"


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and syncs it to the disk; a file or link of that name is removed first, not followed."""
    try:
        descriptor = os.open(path, NEW_FILE, 0o666)
    except FileExistsError:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, NEW_FILE, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


_HAS_NONE = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
"""Errors of some network and virtual-machine file systems, which can't sync a directory."""


def sync_path(path: Path) -> None:
    """Syncs a file to the disk, or a directory, with the renames in it, if the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _HAS_NONE or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all, by renaming a temporary file beside it.

    Raises:
        UnwrittenError: it can't be written; it names ``path``.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, text.encode())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UnwrittenError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yields a draft path beside a file, with its suffix; the draft replaces the file unless the block raises.

    Raises:
        UnwrittenError: the draft can't be written or replace the file; it names ``path``.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}{UNFINISHED}{path.suffix}")
    try:
        draft.unlink(missing_ok=True)  # otherwise we would write through a link
        yield draft
        sync_path(draft)
        draft.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(draft), draft):  # of another file, or of a library
            raise
        raise UnwrittenError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def check_suffix(path: Path, suffixes: Sequence[str], option: str) -> None:
    """Raises a one-line ``ValueError``, about an option, unless a file's name ends in one of ``suffixes``."""
    if path.suffix not in suffixes:
        raise ValueError(f"{option}: {path} must end in {' or '.join(suffixes)}")


def check_writable(path: Path, option: str) -> None:
    """Checks that a file or directory can be made at ``path``, which ``option`` names; makes nothing.

    Raises:
        ValueError: its directory, or the nearest above that exists, is none or can't be written to; one line.
    """
    parent = Path(os.path.realpath(path)).parent  # a link's target is written
    while not os.path.lexists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        raise ValueError(f"{option}: {path} can't be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {path} can't be written: {parent} doesn't let you write")


def why_unwritten(error: OSError) -> str:
    """Says why a file can't be written."""
    return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)


def as_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON; a number that isn't finite becomes null, because JSON has no token for it."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def same_json(one: Any, other: Any) -> bool:
    """Tells whether two values that JSON can hold are the same, also in type and sign: 1 is neither 1.0 nor true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Says whether a value read from a file is a number that a float can hold; integers in JSON may have any size."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def write_json(path: Path, value: Any) -> None:
    """Writes a value by :func:`as_json`, whole or not at all, unless it is unchanged; an ``OSError`` names ``path``."""
    text = _as_text(value)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text() == text:
            return
    replace_text(path, text)


def try_json(path: Path, value: Any) -> None:
    """Writes what :func:`write_json` would beside ``path`` and removes it; an ``OSError`` if it can't be written."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(beside, _as_text(value).encode())
    finally:
        beside.unlink(missing_ok=True)


def _as_text(value: Any) -> str:
    return as_json(value, indent=2) + "\n"


def path_of(place: Any) -> str:
    """Returns a path, a name or an object with a path of its own, such as a :class:`lockstep.Run`, as text."""
    return os.fspath(place) if isinstance(place, os.PathLike) else str(place)


def quoted(path: object) -> str:
    """Quotes a path, or a place on a mirror, as a word of a command line that a user may copy."""
    return shlex.quote(str(path))


def new_directory(path: Path) -> Path:
    """Makes a directory that doesn't exist yet: ``path``, or ``path`` with the first free number appended."""
    wanted, number = path, 1
    while True:
        try:
            wanted.mkdir()
            return wanted
        except FileExistsError:
            number += 1
            wanted = path.with_name(f"{path.name}-{number}")
