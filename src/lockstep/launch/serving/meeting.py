"""Makes what the ranks of one host meet by: memory and a file that nobody else can reach, or a port on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.life import LINE_BYTES
from lockstep.core.topology import DEFAULT_PORT, MEMORY_VARIABLE, STORE_VARIABLE
from lockstep.launch.serving.channel import FILE, STORE

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
MEETING_FILE = "meeting"


@dataclass
class Meeting:
    """What the ranks of a run meet by, and the variables that tell them.

    Attributes:
        environment: the ranks' variables.
        memory: descriptor of memory that ranks inherit, in which each begins with a line of its own; None: not here.
        port: kept for rank 0, or listening for PyTorch's store.
    """

    environment: dict[str, str]
    memory: int | None = None
    port: socket.socket | None = None
    number: int | None = None

    @classmethod
    def of(cls, meeting: str, nproc: int, directory: Path, shared: bool) -> Meeting:
        """Makes them, as ``ServerSettings.meeting`` says, in a directory that is for this user alone.

        ``shared``: with memory, for ranks that know what to do with it.
        """
        made = cls({})
        if meeting == FILE:
            made.environment[STORE_VARIABLE] = str(directory / MEETING_FILE)
            made.environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(DEFAULT_PORT)}  # not what the shell says
        else:
            made._keep_port(listens=meeting == STORE)
        if shared and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # of a sandbox: ranks meet in the file then
                made.memory = os.memfd_create("lockstep", os.MFD_CLOEXEC)
                os.ftruncate(made.memory, nproc * LINE_BYTES)
                made.environment[MEMORY_VARIABLE] = str(made.memory)
        return made

    def _keep_port(self, listens: bool) -> None:
        self.port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if not listens:
            self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # rank 0 listens on it beside us
        self.port.bind((LOOPBACK, 0))
        self.number = self.port.getsockname()[1]
        self.environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self.number)}
        if listens:
            self.port.listen(BACKLOG)
            self.environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "lockstep"}

    @property
    def passed(self) -> list[int]:
        """Lists descriptors that a rank which is a fresh process inherits."""
        return [] if self.memory is None else [self.memory]

    def close(self) -> None:
        """Closes what is held for ranks that are no more."""
        self.leave_port()
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None

    def leave_port(self) -> None:
        """Closes the port, in a rank that was forked."""
        if self.port is not None:
            self.port.close()
