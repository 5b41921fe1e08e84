"""Reads and writes the files of one run's place on a mirror; each file is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.redact import HIDDEN, secrets_in, shown_url
from lockstep.core.errors import one_line

PACKAGES = {
    "s3": "lockstep-rl[s3]",
    "s3a": "lockstep-rl[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oss": "ossfs",
    "sftp": "fsspec paramiko",
    "ssh": "fsspec paramiko",
}
"""The packages to install for a protocol; those without fsspec in their name depend on it."""
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"}
"""Protocols on which a file appears only once it is whole."""
TEMPORARY = ".part"

T = TypeVar("T")


class MirrorError(ValueError):
    """Raised if a mirror can't be used or reached; the message is one line that names it."""


def split_url(url: str) -> tuple[str, str]:
    """Splits the URL of a run's place into the mirror's URL and the run's name."""
    mirror, _, name = url.rstrip("/").rpartition("/")
    return mirror, name


class Place:
    """Gives access to the files below a URL, by relative path, from any number of threads.

    Args:
        url: ``scheme://…`` of anything that fsspec knows, which takes credentials and end points from the environment.

    Attributes:
        url: without a password, fit to be shown.

    Raises:
        MirrorError: the scheme is unknown, its package isn't installed, the place can't be reached, or the URL was
            copied from a message that hid its password.
    """

    def __init__(self, url: str) -> None:
        if f"://{HIDDEN}@" in url or url.endswith(f"?{HIDDEN}"):
            raise MirrorError(f"{shown_url(url)}: {HIDDEN} stands for what is secret; write that in its place")
        asked = url.rstrip("/")
        self.url = url = shown_url(asked)
        self._secrets = secrets_in(asked)
        self._asked, self._root = asked, ""
        self._whole = self._scheme in OBJECT_STORES
        self._own, self._shared = threading.local(), None
        self._file_system()

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    def _connect(self) -> Any:
        scheme = self._scheme
        try:
            import fsspec
        except ImportError:
            raise MirrorError(f"{self.url}: needs fsspec; {how_to_install(scheme)}") from None
        missing = f"{self.url}: fsspec has no package for {scheme}; {how_to_install(scheme)}"
        try:  # caches listings, as paramiko has no option against it, and ossfs relies on the cache
            return fsspec.url_to_fs(self._asked, skip_instance_cache=True)
        except ImportError:
            raise MirrorError(missing) from None
        except ValueError as error:
            unknown = scheme in PACKAGES and scheme not in fsspec.available_protocols()  # its package adds it
            raise MirrorError(missing if unknown else f"{self.url}: {self._said(error)}") from None
        except Exception as error:  # from file systems that connect at once
            raise MirrorError(f"can't reach {self.url}: {self._said(error)}") from error

    @property
    def _connection(self) -> Any:
        """The connection for this thread's next call; None if it needs a new one."""
        return self._shared or getattr(self._own, "fs", None)

    def _file_system(self) -> Any:
        """Returns this thread's connection, or the shared one if the library allows it, with its listings forgotten.

        Most libraries' connections serve one thread, and a lease is renewed while a file is sent.
        """
        fs = self._connection
        if fs is None:
            fs, self._root = self._connect()
            if getattr(fs, "async_impl", False):
                self._shared = fs
            else:
                self._own.fs = fs
        fs.invalidate_cache()
        return fs

    def _failed(self, what: str, error: BaseException) -> MirrorError:
        """Turns a library's error into one that names the mirror; the next call reconnects with new credentials."""
        self._shared = self._own.fs = None
        return MirrorError(f"{what} {self.url}: {self._said(error)}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _said(self, error: BaseException) -> str:
        """Returns a library's error in one line without secrets, because it may quote the URL."""
        text = shown_url(said_by(error))
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _call(self, what: str, action: Callable[[Any], T]) -> T:
        fs = self._file_system()
        try:
            return action(fs)
        except FileNotFoundError:
            raise
        except Exception as error:  # libraries' errors have no common type
            raise self._failed(what, error) from error

    def _ask(self, what: str, action: Callable[[Any], T]) -> T:
        """Calls a read, and calls it again by a new connection if it fails by an existing one.

        Servers and firewalls cut connections that are idle between two checkpoints. Writes aren't repeated: a failure
        may have taken so long that another process has the lease.
        """
        if self._connection is not None:
            with contextlib.suppress(MirrorError):
                return self._call(what, action)
        return self._call(what, action)

    def is_directory(self, path: Path) -> bool:
        """Tells whether this place is a directory of this host, the one at ``path``, by whatever links."""
        return self._scheme in ("file", "local") and Path(self._root).resolve() == path.resolve()

    def read(self, name: str) -> bytes | None:
        """Returns a file's content; None if there is no such file."""
        try:
            return self._ask("can't read", lambda fs: fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file; replaces an existing one."""
        try:
            self._call("can't write", lambda fs: self._write(fs, self._path(name), content))
        except FileNotFoundError as error:  # the bucket doesn't exist
            raise self._failed("can't write", error) from error

    def _write(self, fs: Any, path: str, content: bytes) -> None:
        if self._whole:
            fs.pipe_file(path, content)
            return
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path + TEMPORARY, content)
        fs.mv(path + TEMPORARY, path)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file if there is none yet; returns whether it did. Only some places can do so atomically."""
        if self._glimpse(name) is not None:  # some stores and older packages ignore the condition
            return False
        if not self._whole:
            self.write(name, content)
            return True
        fs = self._file_system()
        try:
            fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if (found := self._glimpse(name)) is not None:  # stores say in many ways that another was first
                return found == content
            if not _is_unknown(error):
                raise self._failed("can't write", error) from error
            self.write(name, content)
        return True

    def _glimpse(self, name: str) -> bytes | None:
        with contextlib.suppress(MirrorError):  # writing says why
            return self.read(name)
        return None

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, and directories below the place that they leave empty; ignores files that aren't there."""
        folders = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._call("can't remove from", lambda fs, name=name: fs.rm_file(self._path(name)))
            folders |= {name.rsplit("/", n)[0] for n in range(1, name.count("/") + 1)}
        if self._whole:
            return
        fs = self._file_system()
        for folder in sorted(folders, key=len, reverse=True):
            with contextlib.suppress(Exception):  # either it is gone, or it stays
                if not fs.ls(self._path(folder), detail=False):  # some libraries remove full directories too
                    fs.rmdir(self._path(folder))

    def names(self) -> list[str]:
        """Lists the files' relative paths, sorted; an empty list if there is nothing."""
        try:
            found = self._ask("can't list", lambda fs: fs.find(self._root))
        except FileNotFoundError:
            return []
        prefix = self._root.rstrip("/") + "/"
        return sorted(n.removeprefix(prefix) for n in found if n.startswith(prefix) and not n.endswith(TEMPORARY))


def how_to_install(scheme: str) -> str:
    """Returns the command that installs what a scheme needs."""
    return " ".join(["pip install", *(f"'{package}'" for package in PACKAGES.get(scheme, "fsspec").split())])


def said_by(error: BaseException) -> str:
    """Returns an error as one line, never empty."""
    return one_line(error) or type(error).__name__


def _is_unknown(error: Exception) -> bool:
    """Tells whether a package or a store doesn't know how to create a file only if there is none."""
    return isinstance(error, (NotImplementedError, TypeError)) or getattr(error, "errno", None) == errno.ENOSYS
