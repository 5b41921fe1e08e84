"""Descriptors that ``select.select`` refuses, as a process gets them that has opened many files."""

import contextlib
import os
import resource
from collections.abc import Iterator

SELECT_KNOWS = 1024


@contextlib.contextmanager
def high_descriptors() -> Iterator[None]:
    """What this process opens in the block has a descriptor from :data:`SELECT_KNOWS` on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 and hard != -1 else 4096, hard))
    try:
        with contextlib.ExitStack() as stack:
            while stack.enter_context(open(os.devnull)).fileno() < SELECT_KNOWS:
                pass
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
