"""Sends a run's records to listeners in another process, callbacks of ``lockstep.train``, and reads their answers."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.life import life
from lockstep.core.process import say
from lockstep.training.stop import CALLBACK, RUNNING

ADDRESS_VARIABLE = "LOCKSTEP_CALLBACKS"
"""Names the listeners' socket; read by the launcher."""
COMMAND_VARIABLE = "LOCKSTEP_COMMAND"
"""Holds the words after ``lockstep`` to record, as JSON, or null, if another program made the command line."""
OBSERVERS = "observe:"
"""Prefix of the address of listeners whose answers aren't waited for."""
CHUNK = 1 << 16
LOOK_SECONDS = 1.0
"""After this time a rank that waits for them signals that it doesn't hang."""


@dataclass(frozen=True)
class Answer:
    """The listeners' answer to an iteration: the stop code that they ask for, and metrics to log with it."""

    code: int = RUNNING
    metrics: Mapping[str, float] | None = None


class Audience:
    """Sends records and waits for answers, on the rank that writes; on others it knows whether answers are waited for.

    Args:
        address: the listeners' address from :data:`ADDRESS_VARIABLE`; None: there are none.
        speaks: whether this rank sends to them.

    Attributes:
        waits: whether training waits for answers, which all ranks then agree on.
        answer: the last one.
    """

    def __init__(self, address: str | None, speaks: bool) -> None:
        self.waits = address is not None and not address.startswith(OBSERVERS)
        self.answer = Answer()
        self._connection: socket.socket | None = None
        self._rest = b""
        if address is not None and speaks:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._connection.connect(address.removeprefix(OBSERVERS))
            except ConnectionRefusedError:  # the caller is gone, and will take this process with it
                self._drop()
            except OSError as error:  # its folder was removed, at a logout for instance, before ranks were restarted
                say(f"lockstep: warning: callbacks aren't called any more: their socket can't be reached ({error})")
                self._drop()

    @property
    def listens(self) -> bool:
        """Whether there is a listener to send to."""
        return self._connection is not None

    def tell(self, record: Mapping[str, Any]) -> Answer:
        """Sends a record; returns the answer, or an empty one at once if answers aren't waited for."""
        self.answer = Answer()
        if self._connection is None:
            return self.answer
        try:
            self._send(json.dumps(dict(record)).encode() + b"\n")
            if self.waits:
                self.answer = self._wait()
        except OSError:
            self._drop()
        return self.answer

    def _send(self, content: bytes) -> None:
        """Sends a line, and waits for room if observers lag behind."""
        assert self._connection is not None
        room = select.poll()  # select.select refuses descriptors from 1024 on
        room.register(self._connection, select.POLLOUT)
        while content:
            if room.poll(LOOK_SECONDS * 1000):
                content = content[self._connection.send(content, socket.MSG_DONTWAIT) :]
            else:
                life.progressed()

    def _wait(self) -> Answer:
        assert self._connection is not None
        self._connection.settimeout(LOOK_SECONDS)
        while True:
            try:
                chunk = self._connection.recv(CHUNK)
            except TimeoutError:
                life.progressed()  # they may take long, and other ranks wait for this one
                continue
            if not chunk:
                self._drop()
                return Answer()
            lines, self._rest = lines_of(self._rest + chunk)
            if lines:
                return _parsed(lines[-1])

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Closes the connection."""
        self._drop()


def lines_of(content: bytes) -> tuple[list[bytes], bytes]:
    """Splits bytes from a socket into whole lines, and the rest."""
    *lines, rest = content.split(b"\n")
    return lines, rest


def _parsed(line: bytes) -> Answer:
    said = json.loads(line)
    return Answer(RUNNING if said["go_on"] else CALLBACK, said["metrics"])
