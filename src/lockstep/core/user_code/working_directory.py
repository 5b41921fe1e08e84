"""Keeps our working directory and that of the user's code apart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_blocks: list[str] = []
_theirs: list[str] = []
"""``_blocks``: where :func:`keep_working_directory` returns to, while a block runs; ``_theirs``: where the user's code
was last.
"""


@contextlib.contextmanager
def keep_working_directory() -> Iterator[None]:
    """Returns to the current working directory after a block of the user's code, which may change it.

    The next block starts in the directory that the last one ended in, because a module is imported only once. Nested
    blocks do nothing.
    """
    try:
        ours = None if _blocks else os.getcwd()
    except FileNotFoundError:
        ours = None
    if ours is None:
        yield
        return
    with contextlib.suppress(OSError):
        os.chdir(_theirs[0] if _theirs else ours)
    _blocks.append(ours)
    try:
        yield
    finally:
        _blocks.clear()
        with contextlib.suppress(OSError):
            _theirs[:] = [now] if (now := os.getcwd()) != ours else []
        with contextlib.suppress(OSError):
            os.chdir(ours)
