"""How a rank tells its launcher that it has done what it was to do: in a file that both open while it begins."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lockstep.core.topology import error_file, started_by_lockstep


class DoneFile:
    """A rank's file, beside the one for its failure; it may be removed, for it is open on both sides.

    Args:
        message_file: where the rank's failure would stand; None: nobody listens.
    """

    def __init__(self, message_file: str | Path | None) -> None:
        self._descriptor: int | None = None
        if message_file is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(Path(message_file).with_suffix(".done"), os.O_RDWR | os.O_CREAT, 0o600)

    @classmethod
    def of_this_rank(cls) -> DoneFile:
        """Opens this process's, if a launcher of ours started it."""
        return cls(error_file() if started_by_lockstep() else None)

    def tell(self) -> None:
        """Says that the rank is done."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 1)  # takes no room, which there may not be

    def told(self) -> bool:
        """Whether the rank has said so."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > 0

    def close(self) -> None:
        """Closes this side's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
