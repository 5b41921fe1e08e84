"""One run's place on a mirror: a few operations on whole files, each of which is there whole or not at all."""

from __future__ import annotations

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
    """The files below a URL, by relative path.

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
        scheme = url.partition("://")[0]
        try:
            import fsspec
        except ImportError:
            raise MirrorError(f"{url}: needs fsspec; {how_to_install(scheme)}") from None
        missing = f"{url}: fsspec has no package for {scheme}; {how_to_install(scheme)}"
        try:
            self._fs, self._root = fsspec.url_to_fs(asked, skip_instance_cache=True, use_listings_cache=False)
        except ImportError:
            raise MirrorError(missing) from None
        except ValueError as error:
            unknown = scheme in PACKAGES and scheme not in fsspec.available_protocols()  # until its package names it
            raise MirrorError(missing if unknown else f"{url}: {self._said(error)}") from None
        except Exception as error:  # of those that connect at once
            raise MirrorError(f"can't reach {url}: {self._said(error)}") from error
        self._whole = scheme in OBJECT_STORES

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _said(self, error: BaseException) -> str:
        """An error of a library's as one line, which may quote what it was asked for."""
        text = shown_url(one_line(error))
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _call(self, what: str, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return action(*args, **kwargs)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any library: what they raise has no common type
            raise MirrorError(f"{what} {self.url}: {self._said(error)}") from error

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, None if there is none."""
        try:
            return self._call("can't read", self._fs.cat_file, self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, over one that is there."""
        try:
            if self._whole:
                self._call("can't write", self._fs.pipe_file, self._path(name), content)
                return
            path = self._path(name)
            self._call("can't write", self._fs.makedirs, path.rpartition("/")[0], exist_ok=True)
            self._call("can't write", self._fs.pipe_file, path + TEMPORARY, content)
            self._call("can't write", self._fs.mv, path + TEMPORARY, path)
        except FileNotFoundError as error:  # of a bucket that isn't there
            raise MirrorError(f"can't write {self.url}: {self._said(error)}") from error

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file that isn't there yet; returns whether it was, where the place can tell."""
        if not self._whole:
            if self.read(name) is not None:
                return False
            self.write(name, content)
            return True
        try:
            self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise MirrorError(f"can't write {self.url}: {self._said(error)}") from error
        except (NotImplementedError, TypeError):
            if self.read(name) is not None:
                return False
            self.write(name, content)
        except Exception as error:
            raise MirrorError(f"can't write {self.url}: {self._said(error)}") from error
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that aren't there are no error."""
        for name in names:
            try:
                self._call("can't remove from", self._fs.rm_file, self._path(name))
            except FileNotFoundError:
                continue

    def names(self) -> list[str]:
        """Lists the files, by relative path, sorted; none where there is nothing."""
        try:
            found = self._call("can't list", self._fs.find, self._root)
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
