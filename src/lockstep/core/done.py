"""Lets a rank tell its launcher that it has finished, through a file that both opened at the start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lockstep.core.topology import error_file, started_by_lockstep


class DoneFile:
    """A rank's file, beside the one for its failure message; it may be deleted, since both sides have it open.

    Args:
        message_file: file for the rank's failure message; None if no launcher listens.
    """

    def __init__(self, message_file: str | Path | None) -> None:
        self._descriptor: int | None = None
        if message_file is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(Path(message_file).with_suffix(".done"), os.O_RDWR | os.O_CREAT, 0o600)

    @classmethod
    def of_this_rank(cls) -> DoneFile:
        """Opens the file of this process, if our launcher started it."""
        return cls(error_file() if started_by_lockstep() else None)

    def tell(self) -> None:
        """Marks the rank as done."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 1)  # works even if the disk is full

    def told(self) -> bool:
        """Says whether the rank is marked as done."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > 0

    def close(self) -> None:
        """Closes this side's descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
