"""Starts and watches the process that trains one seed of a group."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.process import (
    ERROR_PREFIX,
    EXIT_FAILURE,
    STOP_SIGNALS,
    command_that_ends_with_us,
    failure_line,
    kill_session,
    say,
)
from lockstep.core.topology import without_launcher
from lockstep.runs.directory import SUMMARY
from lockstep.runs.listing import UnreadableError, read_object
from lockstep.runs.trust import handed_over
from lockstep.training.audience import COMMAND_VARIABLE

STOPPED = [128 + number for number in STOP_SIGNALS]
"""Exit statuses of a run that a signal has stopped, with a checkpoint."""
READ_SECONDS = 2.0
"""How long to read an ended seed's output, which another process may hold open."""
POLL_SECONDS, INTERRUPT_SECONDS = 0.05, 10.0


@dataclass
class SeedRun:
    """One seed's run, and the process that trains it.

    Attributes:
        path: its directory.
        process: None until it is started.
        said: lines of its standard error.
        code: its exit status, once it has ended.
        named: the names in its group's config, which it may use.
        length: global steps that it is trained for; None if unknown.
    """

    path: Path
    process: subprocess.Popen[str] | None = None
    said: list[str] = field(default_factory=list)
    code: int | None = None
    named: Collection[str] = ()
    length: int | None = None
    _reader: threading.Thread | None = None

    def start(self, file: Path, command: Sequence[str] | None) -> None:
        """Starts ``lockstep train FILE``; ``command`` holds the words that would train the seed alone."""
        variables = without_launcher() | handed_over(self.named) | {COMMAND_VARIABLE: json.dumps(command)}
        self.process = subprocess.Popen(
            command_that_ends_with_us("train", str(file)),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the group passes signals on
        )
        self._reader = threading.Thread(target=self._read, name=f"{self.path.name}-output", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:  # the system allows no other thread
            kill_session(self.process.pid)
            self.process.wait()
            self.process = None
            raise

    def not_started(self, error: Exception) -> None:
        """Records that the system refused to start it, which counts as a failure."""
        why = str(error)
        if isinstance(error, OSError) and error.strerror:
            why = error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"
        self.said.append(f"{ERROR_PREFIX}can't be started: {why}\n")
        self.code = EXIT_FAILURE

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
        """Whether it has been trained to its end, here or in an earlier session."""
        if self.process is not None:
            return self.code == 0
        return (self.summary() or {}).get("status") == "finished"

    def has_come(self, global_step: int) -> bool:
        """Tells whether its process runs and this is its last step, as if it finds that an earlier session was done."""
        return self.is_training and self.length is not None and global_step >= self.length

    def has_ended(self) -> bool:
        """Tells whether its process has ended, and keeps the exit status."""
        assert self.process is not None
        assert self._reader is not None
        if self.process.poll() is None:
            return False
        kill_session(self.process.pid)  # ends what the process has left behind
        self._reader.join(READ_SECONDS)
        self.code = self.process.returncode
        return True

    def failed(self, signalled: int) -> bool:
        """Tells whether it has ended neither at its end nor because a signal stopped it.

        Args:
            signalled: the signal that stopped the group, and may have killed the run before it handled signals; 0 if
                there was none.
        """
        return self.code not in (None, 0, *STOPPED) and not (signalled and self.code == -signalled)

    @property
    def error(self) -> str:
        """The reason why it failed, in a line."""
        return failure_line("".join(self.said), self.code or 0)

    def summary(self) -> dict[str, Any] | None:
        """Reads its ``summary.json``; None if there is none, or it can't be read."""
        try:
            return read_object(self.path / SUMMARY)
        except (OSError, UnreadableError):
            return None


def interrupt(runs: Sequence[SeedRun]) -> None:
    """Passes a second Ctrl-C on to runs that train, and gives launchers seconds to write what they have in memory."""
    running = [run for run in runs if run.is_training]
    for run in running:
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
    end = time.monotonic() + INTERRUPT_SECONDS
    while time.monotonic() < end and not all([run.has_ended() for run in running]):
        time.sleep(POLL_SECONDS)
