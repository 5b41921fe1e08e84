"""Keeps a run to one writer, by the kernel's record locks, which belong to a process and not to its forks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import IO

from lockstep.core.process import at_failure, started_at

RUN, WRITER = 0, 1
"""Bytes of the lock file: the process responsible for the run locks the first, the process that writes the second."""
PATIENCE = 10.0
"""Seconds for which a writer may outlive its launcher."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks: Lustre mounted without ``flock``, NFS without its lock service."""
MOST_BYTES = 4096
"""Bytes of a lock file that are read."""
_POLL = 0.02
_ON_LINUX = sys.platform == "linux"
_QUERY = "hhqqi4x" if _ON_LINUX else "qqihh"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, process; elsewhere type and whence come last."""

_held: dict[tuple[int, int, int], RunLock] = {}
"""Locks of this process by process id (a fork holds none), device and inode; the kernel would grant them again."""


class RunLock:
    """Locks a run by its lock file, whose content names the holder.

    A launcher locks both bytes, and releases the second to the rank that writes once that exists. No other process can
    take the run in between, nor while either of the two lives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._whole = False

    def acquire(self, patience: float = 0.0) -> bool:
        """Takes the run for this process; returns False if another one still has it after ``patience`` seconds."""
        while True:
            if self._key() in _held:
                return False
            file = self._path.open("ab")
            if not (_lock(file, RUN, patience) and _lock(file, WRITER, PATIENCE)):
                file.close()
                return False
            if self._key() == _key_of(file):
                self._keep(file)
                self._whole = True
                self._sign(file)
                return True
            file.close()  # its last holder removed it between our opening and locking it

    def hand_over(self) -> None:
        """Leaves the writing to a rank, which calls :meth:`take_over`."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, WRITER)

    def take_over(self) -> bool:
        """Makes this process the writer for the one that holds the run; returns False if another one writes."""
        if (key := self._key()) is not None and key in _held:
            self._file = _held[key]._file
            return True
        file = self._path.open("ab")
        if not _lock(file, WRITER, PATIENCE):
            file.close()
            return False
        self._keep(file)
        if not os.fstat(file.fileno()).st_size:
            self._sign(file)  # the file that our launcher signed was removed
        return True

    def is_lost(self) -> bool:
        """Tells whether the file that this process locked was removed, so that others can take the run."""
        return self._file is not None and self._key() != _key_of(self._file)

    def renew(self, patience: float = 0.0) -> bool:
        """Takes the run by a new lock file if the old one :meth:`is_lost`; returns False if another process has it.

        ``patience``: seconds to wait for that process, which may be a dying rank of ours.

        Raises:
            OSError: the file can't be made; a ``FileNotFoundError`` if the run's directory is gone too.
        """
        assert self._file is not None
        file = self._path.open("ab")
        if not (_lock(file, RUN, patience) and _lock(file, WRITER, patience) and self._key() == _key_of(file)):
            file.close()
            return False
        owner = _held.pop(_key_of(self._file), self)
        self._file.close()
        owner._file = self._file = file
        _held[_key_of(file)] = owner
        self._sign(file)
        return True

    def release(self) -> None:
        """Releases the run, and removes the lock file."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._key() == _key_of(self._file):  # not that of a process that has taken the run since
                self._path.unlink()
        _held.pop(_key_of(self._file), None)
        self._file.close()
        self._file = None

    def _keep(self, file: IO[bytes]) -> None:
        self._file = file
        _held[_key_of(file)] = self
        at_failure.append(self._release_own)

    def _sign(self, file: IO[bytes]) -> None:
        """Writes the holder into the lock file, unless that is a link to another's file or the disk is full."""
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())}
        with contextlib.suppress(OSError):
            if not self._path.is_symlink():
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), json.dumps(holder).encode())

    def _release_own(self) -> None:
        """Releases the run if this process acquired it, and not the one that forked it or its launcher."""
        if self._whole and self._file is not None and _key_of(self._file) in _held:
            self.release()

    def _key(self) -> tuple[int, int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            return os.getpid(), status.st_dev, status.st_ino
        return None


def _key_of(file: IO[bytes]) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return os.getpid(), status.st_dev, status.st_ino


def holder_of(path: Path) -> str:
    """Says ``another process``, with its id and host if the lock file names them."""
    try:
        status = path.lstat()
        if (os.getpid(), status.st_dev, status.st_ino) in _held or not stat.S_ISREG(status.st_mode):
            return "another process"  # our own: closing the file would release the lock
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        return f"another process, {int(found['pid'])} on {found['host']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"  # an older version wrote nothing there, or the holder hasn't yet


class UnwritableError(ValueError):
    """This process can't write a run, though no other process is writing it; one line."""


def why_not_locked(error: OSError) -> str:
    """Says why a run can't be locked if no other process has it, and what would help."""
    why = error.strerror or error
    if error.errno in WITHOUT_LOCKS:
        return f"lies where there are no file locks ({why}); mount Lustre with flock, or use another --runs-dir"
    return f"can't be written ({why}); copy it to where you may write"


def is_held(path: Path) -> bool:
    """Tells whether a process has locked a run; only asks, so that it never gets in the way of a run about to begin.

    Returns False if the file system can't tell.
    """
    try:
        status = path.lstat()
    except OSError:
        return False  # no process has it, or its last holder has just removed it
    if not stat.S_ISREG(status.st_mode):
        return False
    if (os.getpid(), status.st_dev, status.st_ino) in _held:
        return True  # the kernel reports no lock of our own, and closing the file would release it
    asked = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0) if _ON_LINUX else (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    try:
        with path.open("rb") as file:
            told = struct.unpack(_QUERY, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_QUERY, *asked)))
    except OSError:
        return False
    return told[0 if _ON_LINUX else 3] != fcntl.F_UNLCK


def _lock(file: IO[bytes], byte: int, seconds: float) -> bool:
    """Locks one byte; returns False if another process still holds it after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise  # see WITHOUT_LOCKS
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
