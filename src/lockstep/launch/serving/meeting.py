"""Makes what the ranks of one host meet by: private memory and a private file, or a port on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.life import LINE_BYTES
from lockstep.core.topology import DEFAULT_PORT, LOOPBACK_ADDRESS, MEMORY_VARIABLE, STORE_VARIABLE
from lockstep.launch.serving.channel import FILE, STORE

BACKLOG = 1024
MEETING_FILE = "meeting"


@dataclass
class Meeting:
    """What the ranks of a run meet by, and the environment variables that tell them so.

    Attributes:
        environment: the ranks' variables.
        memory: descriptor of shared memory that ranks inherit, which begins with a line for each rank; None without.
        port: socket that reserves a port for rank 0, or listens for PyTorch's store; None without.
        number: of that port.
    """

    environment: dict[str, str]
    memory: int | None = None
    port: socket.socket | None = None
    number: int | None = None

    @classmethod
    def of(cls, meeting: str, nproc: int, directory: Path, shared: bool) -> Meeting:
        """Makes what ``nproc`` ranks meet by.

        Args:
            meeting: as in :class:`~lockstep.launch.serving.channel.ServerSettings`.
            nproc: number of ranks.
            directory: for the file; only this user can read it.
            shared: whether ranks can use shared memory.
        """
        made = cls({})
        if meeting == FILE:
            made.environment[STORE_VARIABLE] = str(directory / MEETING_FILE)
            made.environment["MASTER_ADDR"] = LOOPBACK_ADDRESS  # hides the shell's values
            made.environment["MASTER_PORT"] = str(DEFAULT_PORT)
        else:
            made._keep_port(listens=meeting == STORE)
        if shared and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it: ranks do without
                made.memory = os.memfd_create("lockstep", os.MFD_CLOEXEC)
                os.ftruncate(made.memory, nproc * LINE_BYTES)
                made.environment[MEMORY_VARIABLE] = str(made.memory)
        return made

    def _keep_port(self, listens: bool) -> None:
        self.port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if not listens:
            self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # rank 0 listens on it beside us
        self.port.bind((LOOPBACK_ADDRESS, 0))
        self.number = self.port.getsockname()[1]
        self.environment |= {"MASTER_ADDR": LOOPBACK_ADDRESS, "MASTER_PORT": str(self.number)}
        if listens:
            self.port.listen(BACKLOG)
            self.environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "lockstep"}

    @property
    def passed(self) -> list[int]:
        """The descriptors to pass to a rank that is a fresh process."""
        return [] if self.memory is None else [self.memory]

    def close(self) -> None:
        """Closes the port and the memory, once the ranks have ended."""
        self.leave_port()
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None

    def leave_port(self) -> None:
        """Closes the port, in a rank that was forked."""
        if self.port is not None:
            self.port.close()
