"""Temporary directories that are gone in the end: by the one who made them, or by the next one who makes one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "lockstep-"
_BEGUN = ".lockstep-new-"
_HELD = ".held"
_BEGIN_SECONDS = 3600.0
"""A directory that was begun so long ago, and isn't held yet, never will be: its maker was killed."""
_HOST_BYTES = 4
"""Of a host's name as a digest: a socket's path has room for few letters, and no name may begin another."""
_MEMORY = Path("/dev/shm")


@contextmanager
def temporary_directory(in_memory: bool = False, within: Path | None = None) -> Iterator[Path]:
    """Makes a directory for as long as the block runs, and removes those whose maker was killed on this host.

    Args:
        in_memory: in a file system that is one, if there is one where this user may write.
        within: in this directory, which other hosts may share, as they may the one of temporary files.
    """
    base = _MEMORY if in_memory and os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    begun = Path(tempfile.mkdtemp(prefix=_BEGUN + of_this_host(), dir=within or base))
    directory = begun.with_name(PREFIX + begun.name.removeprefix(_BEGUN))
    with hold(begun):
        begun.rename(directory)  # nobody sees it under this name before it is held
        sweep_temporary(within)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Keeps others from removing a directory as long as the block runs; if this process is killed in it, they do."""
    with (directory / _HELD).open("w") as held:
        _lock(held.fileno())
        yield


def of_this_host() -> str:
    """Begins names of directories that other hosts may see, whose locks may not be seen by all of them."""
    return f"{hashlib.blake2b(platform.node().encode(), digest_size=_HOST_BYTES).hexdigest()}-"


def _lock(descriptor: int) -> bool:
    """Locks a file for as long as this process has it open; says whether nobody else has."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def sweep_temporary(within: Path | None = None) -> None:
    """Removes directories of this user that nobody holds: their makers were killed. Also ``within`` a directory.

    Only memory is this host's alone, though its name may have changed: a container's does.
    """
    places = [(Path(tempfile.gettempdir()), of_this_host()), (_MEMORY, "")]
    for base, ours in places if within is None else [*places, (within, of_this_host())]:
        for directory in [*base.glob(f"{PREFIX}{ours}*"), *base.glob(f"{_BEGUN}{ours}*")]:
            with contextlib.suppress(OSError):
                _sweep(directory)


def _sweep(directory: Path) -> None:
    """Removes a directory that was made here and is nobody's any more."""
    found, held = directory.stat(follow_symlinks=False), directory / _HELD
    if directory.is_symlink() or found.st_uid != os.getuid():
        return
    begun = directory.name.startswith(_BEGUN)
    if begun and time.time() - found.st_mtime < _BEGIN_SECONDS:
        return
    if not held.exists():
        if begun and directory.is_dir():  # killed before it could hold it
            shutil.rmtree(directory, ignore_errors=True)
        return
    if held.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    with held.open("r") as file:
        if _lock(file.fileno()):
            shutil.rmtree(directory, ignore_errors=True)
