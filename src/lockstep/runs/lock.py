"""Keeps a run to one writer, by the kernel's record locks: they are of one process, not of what it forks."""

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
"""Bytes of the lock file: whoever is responsible for the run holds the first, the process that writes the second."""
PATIENCE = 10.0
"""Seconds that a writer whose launcher is gone may take to die."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system says that keeps no locks: Lustre mounted without ``flock``, NFS without its lock service."""
MOST_BYTES = 4096
"""Of a lock file that are read."""
_POLL = 0.02
_ON_LINUX = sys.platform == "linux"
_QUERY = "hhqqi4x" if _ON_LINUX else "qqihh"
"""``struct flock`` on 64-bit systems: type, whence, start, length, process; on the others type and whence come last."""

_held: dict[tuple[int, int, int], RunLock] = {}
"""Locks of this process (its id comes first: a fork holds none) by device and inode; the kernel refuses it nothing."""


class RunLock:
    """Holds the lock file of a run, in which stands who does.

    A launcher takes both bytes, and leaves the second one to the rank that writes once it exists; nobody else can have
    the run in between, nor while any of the two processes lives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._whole = False

    def acquire(self, patience: float = 0.0) -> bool:
        """Take the run for this process, which will write it; False if another one has it for so many seconds."""
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
        """Leave the writing to a rank, which calls :meth:`take_over`."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, WRITER)

    def take_over(self) -> bool:
        """Become the process that writes, for one that holds the run; False if another one writes."""
        if (key := self._key()) is not None and key in _held:
            self._file = _held[key]._file
            return True
        file = self._path.open("ab")
        if not _lock(file, WRITER, PATIENCE):
            file.close()
            return False
        self._keep(file)
        if not os.fstat(file.fileno()).st_size:
            self._sign(file)  # what our launcher had signed was removed
        return True

    def is_lost(self) -> bool:
        """Whether the file that this process has taken isn't there any more, by which others may write the run too."""
        return self._file is not None and self._key() != _key_of(self._file)

    def renew(self, patience: float = 0.0) -> bool:
        """Take the run by a new file where the old one :meth:`is_lost`; False if another process has it meanwhile.

        ``patience``: seconds that whoever has it may take to let it go, as our ranks do that are dying.

        Raises:
            OSError: the file can't be made; a ``FileNotFoundError`` where the run's directory is gone too.
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
        """Let others have the run, and remove the file."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._key() == _key_of(self._file):  # not another run's that began in between
                self._path.unlink()
        _held.pop(_key_of(self._file), None)
        self._file.close()
        self._file = None

    def _keep(self, file: IO[bytes]) -> None:
        self._file = file
        _held[_key_of(file)] = self
        at_failure.append(self._release_own)

    def _sign(self, file: IO[bytes]) -> None:
        """Writes down who has the run; a link's file is another's, and on a full disk nothing stands there."""
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())}
        with contextlib.suppress(OSError):
            if not self._path.is_symlink():
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), json.dumps(holder).encode())

    def _release_own(self) -> None:
        """Releases the run unless the process that forked this one holds it, or our launcher, which will."""
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
    """Says which process has the run of a lock file, as far as that stands there: ``another process``, and which."""
    try:
        status = path.lstat()
        if (os.getpid(), status.st_dev, status.st_ino) in _held or not stat.S_ISREG(status.st_mode):
            return "another process"  # that is ourselves, and closing the file would release the lock
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        return f"another process, {int(found['pid'])} on {found['host']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"  # of a version that wrote nothing there, or just about to


def why_not_locked(error: OSError) -> str:
    """Says what keeps a run's lock from being taken, other than another process, and what would help."""
    why = error.strerror or error
    if error.errno in WITHOUT_LOCKS:
        return f"lies where there are no file locks ({why}); mount Lustre with flock, or use another --runs-dir"
    return f"can't be written ({why}); copy it to where you may write"


def is_held(path: Path) -> bool:
    """Whether a process has the run of a lock file; asks only, and takes nothing that a run about to begin would miss.

    False where the file system can't tell.
    """
    if path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    if (os.getpid(), status.st_dev, status.st_ino) in _held:
        return True  # the kernel knows no lock against ourselves, and closing the file would release it
    asked = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0) if _ON_LINUX else (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    try:
        with path.open("rb") as file:
            told = struct.unpack(_QUERY, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_QUERY, *asked)))
    except OSError:
        return False
    return told[0 if _ON_LINUX else 3] != fcntl.F_UNLCK


def _lock(file: IO[bytes], byte: int, seconds: float) -> bool:
    """Lock one byte, trying for some seconds."""
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
