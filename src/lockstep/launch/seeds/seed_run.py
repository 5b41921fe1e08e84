"""One seed of a group: its run, and the process that trains it."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.process import ERROR_PREFIX, STOP_SIGNALS, command_that_ends_with_us, kill_session, said_error, say
from lockstep.core.topology import without_launcher
from lockstep.runs.directory import SUMMARY
from lockstep.runs.listing import UnreadableError, read_object
from lockstep.runs.trust import handed_over
from lockstep.training.audience import COMMAND_VARIABLE

STOPPED = [128 + number for number in STOP_SIGNALS]
"""Exit statuses of a run that a signal has stopped, with a checkpoint."""
READ_SECONDS = 2.0
"""How long what a seed has said may take to be read, once it has ended and somebody else may hold its output open."""


@dataclass
class SeedRun:
    """One seed's run: its directory, and while it trains its process.

    Attributes:
        said: lines of its standard error.
        code: its exit status, once it has ended.
        named: what its group names, and it may name.
    """

    path: Path
    process: subprocess.Popen[str] | None = None
    said: list[str] = field(default_factory=list)
    code: int | None = None
    named: Collection[str] = ()
    _reader: threading.Thread | None = None

    def start(self, file: Path, command: Sequence[str] | None) -> None:
        """Starts ``lockstep train FILE``; ``command`` are the words that would train it by itself."""
        variables = without_launcher() | handed_over(self.named) | {COMMAND_VARIABLE: json.dumps(command)}
        self.process = subprocess.Popen(
            command_that_ends_with_us("train", str(file)),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # signals are the group's to pass on
        )
        self._reader = threading.Thread(target=self._read, name=f"{self.path.name}-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if not line.startswith(ERROR_PREFIX) and line.strip():
                say(f"{self.path.name}: {line.rstrip()}")

    @property
    def is_training(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.code is None

    @property
    def is_done(self) -> bool:
        """Whether it has been trained to its end, by its process here or in an earlier session."""
        if self.process is not None:
            return self.code == 0
        return (self.summary() or {}).get("status") == "finished"

    def has_ended(self) -> bool:
        """Tells whether its process has ended, and keeps the exit status."""
        assert self.process is not None
        assert self._reader is not None
        if self.process.poll() is None:
            return False
        kill_session(self.process.pid)  # what it has started, and left
        self._reader.join(READ_SECONDS)
        self.code = self.process.returncode
        return True

    def failed(self, signalled: int) -> bool:
        """Whether it has ended otherwise than at its end, or stopped as a signal asked.

        Args:
            signalled: the signal that stopped the group, which may have met the run before it listened; 0: none did.
        """
        return self.code not in (None, 0, *STOPPED) and not (signalled and self.code == -signalled)

    @property
    def error(self) -> str:
        """Why it failed, in a line."""
        return said_error("".join(self.said), self.code or 0)

    def summary(self) -> dict[str, Any] | None:
        """Returns what it left; None while no session has ended well."""
        try:
            return read_object(self.path / SUMMARY)
        except (OSError, UnreadableError):
            return None
