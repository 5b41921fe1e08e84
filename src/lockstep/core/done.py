"""Lets a rank tell its launcher one thing, that it has finished for instance, through a file that both open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lockstep.core.topology import error_file, started_by_lockstep


class Mark:
    """A file by which one process tells another that something is so; it may be deleted once both have it open.

    Args:
        path: the file; None if nobody listens.
    """

    def __init__(self, path: Path | None) -> None:
        self._descriptor: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def tell(self, what: int = 1) -> None:
        """Says that it is so; ``what``, a small number from 1 on, may tell how."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, what)  # works even if the disk is full

    def told(self) -> int:
        """Returns what was said; 0 if nothing."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Closes this side's descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


UNSTOPPED = 1
"""What a rank that is done says if no signal ended its training; else it says the exit status, ``128 + n``."""


class DoneFile(Mark):
    """A rank's mark that it is done, beside the file for its failure message.

    Args:
        message_file: file for the rank's failure message; None if no launcher listens.
    """

    def __init__(self, message_file: str | Path | None) -> None:
        super().__init__(None if message_file is None else Path(message_file).with_suffix(".done"))

    @classmethod
    def of_this_rank(cls) -> DoneFile:
        """Opens the file of this process, if our launcher started it."""
        return cls(error_file() if started_by_lockstep() else None)
