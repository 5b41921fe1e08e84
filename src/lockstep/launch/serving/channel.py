"""Carries messages between a launcher and its server of ranks."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Variables that keep libraries from starting threads, which a fork would lose."""

FILE, STORE, PORT = "file", "store", "port"
"""How ranks meet: in a private file, in PyTorch's store inside the server, or at rank 0's port."""


def readable(watched: Sequence[Any], seconds: float | None) -> list[Any]:
    """Waits until something can be read, or has ended; returns what, or nothing after ``seconds`` (None: no limit).

    ``select.select`` refuses descriptors from 1024 on, and a process that has opened many files has only those left.

    Args:
        watched: descriptors, and objects with a ``fileno``.
        seconds: how long to wait.
    """
    ready = select.poll()
    for each in watched:
        ready.register(each, select.POLLIN)
    found = {number for number, _ in ready.poll(None if seconds is None else seconds * 1000)}
    return [each for each in watched if (each if isinstance(each, int) else each.fileno()) in found]


class Channel:
    """Exchanges JSON values, one per line, over a stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def fileno(self) -> int:
        """Returns the socket's descriptor, for :func:`readable`."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        """Sends a value; drops it if the other side is gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(value).encode() + b"\n")

    @property
    def pending(self) -> bool:
        """Whether a whole value has been read from the socket and is yet to be received."""
        return b"\n" in self._buffer

    def receive(self, seconds: float | None = None) -> Any:
        """Waits for the next value.

        Raises:
            TimeoutError: none came within ``seconds``.
            EOFError: the other side is gone, or this one was closed.
        """
        while not self.pending:
            try:
                if not readable([self._connection], seconds):
                    raise TimeoutError
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                raise
            except (OSError, ValueError):
                data = b""
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Closes the socket; the other side reads end-of-file."""
        self._connection.close()


@dataclass(frozen=True)
class ServerSettings:
    """What a launcher tells its server when it starts it.

    Attributes:
        parent: the launcher's process id.
        engine: the server loads its modules before it answers anything; None: it loads none.
        forks: whether ranks may be forked from the server; otherwise they are fresh processes.
        meeting: how the ranks meet: ``FILE``, ``STORE`` or ``PORT``.
        environment: the launcher's values of the variables in ``ONE_THREAD``, which ranks get back.
    """

    parent: int
    engine: str | None
    forks: bool
    meeting: str
    environment: dict[str, str | None]
