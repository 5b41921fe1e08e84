"""Temporary directories that are removed by their maker or, if it was killed, by the next process that makes one."""

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
"""Age after which a directory that was begun but isn't locked never will be: its maker was killed."""
_HOST_BYTES = 4
"""Bytes of the digest of a host's name: few, because socket paths are short; of one length, so none begins another."""
_MEMORY = Path("/dev/shm")


@contextmanager
def temporary_directory(in_memory: bool = False, within: Path | None = None) -> Iterator[Path]:
    """Makes a directory for the duration of the block, and removes those whose maker was killed on this host.

    Args:
        in_memory: make it in a file system in memory, if there is one where this user may write.
        within: make it in this directory, which other hosts may share.
    """
    base = _MEMORY if in_memory and os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    begun = Path(tempfile.mkdtemp(prefix=_BEGUN + of_this_host(), dir=within or base))
    directory = begun.with_name(PREFIX + begun.name.removeprefix(_BEGUN))
    with hold(begun):
        begun.rename(directory)  # it gets this name only once it is locked
        sweep_temporary(within)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Locks a directory during the block, so that others don't remove it; if this process is killed, they may."""
    with (directory / _HELD).open("w") as held:
        _lock(held.fileno())
        yield


def of_this_host() -> str:
    """Returns a prefix for directories that other hosts may see, because not all of them may see our locks."""
    return f"{hashlib.blake2b(platform.node().encode(), digest_size=_HOST_BYTES).hexdigest()}-"


def _lock(descriptor: int) -> bool:
    """Locks a file until this process closes it; returns whether that succeeded."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def sweep_temporary(within: Path | None = None) -> None:
    """Removes this user's directories that nobody holds, because their makers were killed; also those in ``within``.

    Directories in memory need no host prefix: only this host sees them, and a container's host name may have changed.
    """
    places = [(Path(tempfile.gettempdir()), of_this_host()), (_MEMORY, "")]
    for base, ours in places if within is None else [*places, (within, of_this_host())]:
        for directory in [*base.glob(f"{PREFIX}{ours}*"), *base.glob(f"{_BEGUN}{ours}*")]:
            with contextlib.suppress(OSError):
                _sweep(directory)


def _sweep(directory: Path) -> None:
    """Removes a directory if this user made it and nobody holds it any more."""
    found, held = directory.stat(follow_symlinks=False), directory / _HELD
    if directory.is_symlink() or found.st_uid != os.getuid():
        return
    begun = directory.name.startswith(_BEGUN)
    if begun and time.time() - found.st_mtime < _BEGIN_SECONDS:
        return
    if not held.exists():
        if begun and directory.is_dir():  # its maker was killed before it locked it
            shutil.rmtree(directory, ignore_errors=True)
        return
    if held.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    with held.open("r") as file:
        if _lock(file.fileno()):
            shutil.rmtree(directory, ignore_errors=True)
