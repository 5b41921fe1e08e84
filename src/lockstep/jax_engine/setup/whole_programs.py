"""Has JAX write compiled programs whole or not at all into its cache, and removes those that were torn before.

JAX writes a program under its final name and never writes it again. If the process is killed there, or the disk is
full, a part of the file stays. Every later start would find it, fail to read it and compile the program anew.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.files import UNFINISHED, sync_path

SUFFIX = "-cache"
"""With which JAX ends the names of programs."""
DRAFT_SECONDS = 86400.0
"""How long nothing was written to a draft that no process writes any more."""


@functools.cache
def keep_programs_whole() -> None:
    """Changes how JAX writes and reads compiled programs in this process; does nothing in unknown versions.

    A cache of limited size, or one that isn't in the file system, is written by JAX alone.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compilation_cache
        from jax._src.lru_cache import LRUCache

        put, read = LRUCache.put, compilation_cache.get_executable_and_time
        decompress = compilation_cache.decompress_executable
        cache_of = compilation_cache._get_cache  # pyright: ignore[reportPrivateUsage]

        @functools.wraps(put)
        def put_whole(self: Any, key: str, value: bytes) -> None:
            directory = None if getattr(self, "eviction_enabled", True) else _directory(self)
            if directory is None:
                put(self, key, value)
            else:
                write_whole(directory / f"{key}{SUFFIX}", value)

        @functools.wraps(read)
        def read_whole(cache_key: str, compile_options: Any, backend: Any, *rest: Any) -> Any:
            try:
                return read(cache_key, compile_options, backend, *rest)
            except Exception:
                directory = _directory(cache_of(backend))
                if directory is None or not remove_torn(directory / f"{cache_key}{SUFFIX}", decompress):
                    raise
                return None, None  # there is none: it is compiled, and written

        LRUCache.put, compilation_cache.get_executable_and_time = put_whole, read_whole


def _directory(cache: Any) -> Path | None:
    """Returns the directory of one of JAX's caches; None if it isn't in the file system."""
    path = getattr(cache, "_path", None)
    return None if path is None or "://" in str(path) else Path(path)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that isn't there yet, by renaming a draft beside it.

    Raises:
        OSError: it can't be written; nothing is left of it.
    """
    if path.exists():
        return
    sweep_drafts(path.parent)
    draft = path.with_name(f".{uuid.uuid4().hex}{UNFINISHED}")  # hosts that share a cache may share process ids
    try:
        draft.write_bytes(content)
        sync_path(draft)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


@functools.cache
def sweep_drafts(directory: Path) -> None:
    """Removes the drafts of processes that were killed."""
    for draft in directory.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > DRAFT_SECONDS:
                draft.unlink()


def remove_torn(path: Path, decompress: Callable[[bytes], bytes]) -> bool:
    """Removes a program that can't be decompressed; returns whether it has.

    One that can was replaced by another process, or something else is wrong with it.
    """
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        try:
            decompress(content)
        except Exception:
            path.unlink()
            return True
    return False
