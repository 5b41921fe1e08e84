"""One run's place on a mirror: a few operations on whole files, each of which is there whole or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lockstep.config.redact import HIDDEN, secrets_in, shown_url

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
"""What to install for a protocol, which brings fsspec where it isn't named."""
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"}
"""Where a file appears once it is whole."""
TEMPORARY = ".part"

T = TypeVar("T")


class MirrorError(ValueError):
    """A mirror can't be had or reached; the message is one line that names it."""


def split_url(url: str) -> tuple[str, str]:
    """Splits the place of a run into the mirror and the run's name."""
    mirror, _, name = url.rstrip("/").rpartition("/")
    return mirror, name


class Place:
    """The files below a URL, by relative path; any number of threads may call it.

    Args:
        url: ``scheme://…`` of anything that fsspec knows; credentials and end points are those of its environment.

    Attributes:
        url: as it may be shown, without a password.

    Raises:
        MirrorError: the scheme is unknown, its package isn't installed, it can't be reached, or the URL is one that was
            shown without its password.
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
        try:  # with a cache of listings: paramiko knows no such option, and ossfs reads back what it puts there
            return fsspec.url_to_fs(self._asked, skip_instance_cache=True)
        except ImportError:
            raise MirrorError(missing) from None
        except ValueError as error:
            unknown = scheme in PACKAGES and scheme not in fsspec.available_protocols()  # until its package names it
            raise MirrorError(missing if unknown else f"{self.url}: {self._said(error)}") from None
        except Exception as error:  # of those that connect at once
            raise MirrorError(f"can't reach {self.url}: {self._said(error)}") from error

    @property
    def _connection(self) -> Any:
        """What this thread's next call goes by; None: a new one."""
        return self._shared or getattr(self._own, "fs", None)

    def _file_system(self) -> Any:
        """Connects this thread, or all where calls are for any number of threads; what was listed before is forgotten.

        Most libraries' connections are for one thread: a lease is renewed while a file is sent.
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
        """Makes an error of a library's one that names the mirror; the next call connects anew, by new credentials."""
        self._shared = self._own.fs = None
        return MirrorError(f"{what} {self.url}: {self._said(error)}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _said(self, error: BaseException) -> str:
        """An error of a library's as one line, which may quote what it was asked for."""
        text = shown_url(one_line(error))
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _call(self, what: str, action: Callable[[Any], T]) -> T:
        fs = self._file_system()
        try:
            return action(fs)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any library: what they raise has no common type
            raise self._failed(what, error) from error

    def _ask(self, what: str, action: Callable[[Any], T]) -> T:
        """Calls what changes nothing, and once more by a new connection if one of an earlier call fails.

        Between two checkpoints a connection is idle, which servers and firewalls cut. What writes isn't called again:
        its failure may have taken so long that another process has the lease.
        """
        if self._connection is not None:
            with contextlib.suppress(MirrorError):
                return self._call(what, action)
        return self._call(what, action)

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, None if there is none."""
        try:
            return self._ask("can't read", lambda fs: fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, over one that is there."""
        try:
            self._call("can't write", lambda fs: self._write(fs, self._path(name), content))
        except FileNotFoundError as error:  # of a bucket that isn't there
            raise self._failed("can't write", error) from error

    def _write(self, fs: Any, path: str, content: bytes) -> None:
        if self._whole:
            fs.pipe_file(path, content)
            return
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path + TEMPORARY, content)
        fs.mv(path + TEMPORARY, path)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file that isn't there yet; returns whether it was, where the place can tell."""
        if not self._whole:
            return self._create_after_a_look(name, content)
        fs = self._file_system()
        try:
            fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError):
            return self._create_after_a_look(name, content)
        except Exception as error:
            raise self._failed("can't write", error) from error
        return True

    def _create_after_a_look(self, name: str, content: bytes) -> bool:
        if self.read(name) is not None:
            return False
        self.write(name, content)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, and the directories below the place that they leave empty; what isn't there is no error."""
        folders = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._call("can't remove from", lambda fs, name=name: fs.rm_file(self._path(name)))
            folders |= {name.rsplit("/", n)[0] for n in range(1, name.count("/") + 1)}
        if self._whole:
            return
        fs = self._file_system()
        for folder in sorted(folders, key=len, reverse=True):
            with contextlib.suppress(Exception):  # of whatever type: it is gone, or stays
                if not fs.ls(self._path(folder), detail=False):  # some remove what is in it as well
                    fs.rmdir(self._path(folder))

    def names(self) -> list[str]:
        """Lists the files, by relative path, sorted; none where there is nothing."""
        try:
            found = self._ask("can't list", lambda fs: fs.find(self._root))
        except FileNotFoundError:
            return []
        prefix = self._root.rstrip("/") + "/"
        return sorted(n.removeprefix(prefix) for n in found if n.startswith(prefix) and not n.endswith(TEMPORARY))


def how_to_install(scheme: str) -> str:
    """Names the command that installs what a scheme needs."""
    return " ".join(["pip install", *(f"'{package}'" for package in PACKAGES.get(scheme, "fsspec").split())])


def one_line(error: BaseException) -> str:
    """Returns an error as one line, never empty."""
    return " ".join(str(error).split()) or type(error).__name__
