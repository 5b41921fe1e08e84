"""Temporary directories that are gone in the end: by the one who made them, or by the next one who makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "lockstep-"
_BEGUN = ".lockstep-new-"
_HELD = ".held"


_MEMORY = Path("/dev/shm")


@contextmanager
def temporary_directory(in_memory: bool = False) -> Iterator[Path]:
    """Makes a directory for as long as the block runs, and removes those whose maker was killed.

    ``in_memory``: in a file system that is one, if there is one where this user may write.
    """
    base = _MEMORY if in_memory and os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    begun = Path(tempfile.mkdtemp(prefix=_BEGUN, dir=base))
    directory = begun.with_name(PREFIX + begun.name.removeprefix(_BEGUN))
    with (begun / _HELD).open("w") as held:
        _lock(held.fileno())
        begun.rename(directory)  # nobody sees it under this name before it is locked
        sweep_temporary()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _lock(descriptor: int) -> bool:
    """Locks a file for as long as this process has it open; says whether nobody else has."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def sweep_temporary() -> None:
    """Removes directories of this user that nobody holds: their makers were killed."""
    for held in (held for base in (Path(tempfile.gettempdir()), _MEMORY) for held in base.glob(f"{PREFIX}*/{_HELD}")):
        with contextlib.suppress(OSError):
            if held.stat(follow_symlinks=False).st_uid != os.getuid() or held.parent.is_symlink():
                continue
            with held.open("r") as file:
                if _lock(file.fileno()):
                    shutil.rmtree(held.parent, ignore_errors=True)
