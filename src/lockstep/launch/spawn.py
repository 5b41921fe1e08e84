"""Starting ranks on this machine as plain processes, for an engine whose framework has no launcher of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.core.topology import LAUNCHER_VARIABLE

LOOPBACK = "127.0.0.1"
KILL_SECONDS = 5.0


class SpawnedRanks:
    """The rank processes of one run, which meet on loopback, on a port that the kernel chose.

    The port stays bound here, unheard, until the ranks are ended: rank 0 listens on it beside us (``SO_REUSEPORT``),
    and nobody else can be given it in between.

    Args:
        arguments: of ``python``, the same for every rank.
        nproc: number of ranks.
        log_dir: where failing ranks leave their messages.
        environment: more variables for every rank.
    """

    def __init__(
        self, arguments: Sequence[str], nproc: int, log_dir: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log_dir = log_dir
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if hasattr(socket, "SO_REUSEPORT"):
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind((LOOPBACK, 0))
        port = self._port.getsockname()[1]
        if not hasattr(socket, "SO_REUSEPORT"):
            self._port.close()
        common = {
            **os.environ,
            **(environment or {}),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            LAUNCHER_VARIABLE: "1",
        }
        common.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a torchrun around us has a store of its own
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(nproc):
                self._processes[rank] = self._start(arguments, rank, common)
        except BaseException:
            self.kill()
            raise

    def _start(self, arguments: Sequence[str], rank: int, common: Mapping[str, str]) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": self.message_file(rank)}
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, **own},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is this process's to pass on; and each rank can be ended with its own
        )

    def exit_codes(self) -> dict[int, int | None]:
        """Exit code of each rank, None while it runs, ``-n`` if signal ``n`` killed it."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def message_file(self, rank: int) -> str:
        """Where a failing rank leaves its message."""
        return str(self._log_dir / f"rank_{rank}.json")

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """End every rank, and whatever it started, at once."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group outlives a rank that left workers behind
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        self._port.close()
