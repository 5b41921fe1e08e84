"""Those who listen to a run from another process, and may answer: callbacks of whoever called ``lockstep.train``."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.life import life
from lockstep.training.stop import CALLBACK, RUNNING

ADDRESS_VARIABLE = "LOCKSTEP_CALLBACKS"
"""Names the socket at which they listen; the launcher reads it."""
COMMAND_VARIABLE = "LOCKSTEP_COMMAND"
"""Holds the words after ``lockstep`` to remember as JSON, or null, where another program has made the command line."""
OBSERVERS = "observe:"
"""Before it: nobody is waited for."""
CHUNK = 1 << 16
LOOK_SECONDS = 1.0
"""After which a rank that waits for them shows that it isn't the one that hangs."""


@dataclass(frozen=True)
class Answer:
    """What they say to an iteration: the stop code that the rank which asked wants, and metrics to log with it."""

    code: int = RUNNING
    metrics: Mapping[str, float] | None = None


class Audience:
    """Tells records, and waits for answers, on the rank that writes; on others it knows whether there will be any.

    Args:
        address: where they listen, as :data:`ADDRESS_VARIABLE` says it; None: nobody does.
        speaks: whether this rank tells them.

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
            except OSError:  # whoever called is gone, and this process soon as well
                self._drop()

    @property
    def listens(self) -> bool:
        """Whether there is somebody to tell."""
        return self._connection is not None

    def tell(self, record: Mapping[str, Any]) -> Answer:
        """Tells a record; returns the answer, or nothing at once where nobody waits for it."""
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
        """Hands over a line, and waits for room where those who observe are far behind."""
        assert self._connection is not None
        while content:
            if select.select([], [self._connection], [], LOOK_SECONDS)[1]:
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
                life.progressed()  # they may take their time: other ranks wait for this one
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
        """Says goodbye."""
        self._drop()


def lines_of(content: bytes) -> tuple[list[bytes], bytes]:
    """Cuts what came over a socket into whole lines, and the rest."""
    *lines, rest = content.split(b"\n")
    return lines, rest


def _parsed(line: bytes) -> Answer:
    said = json.loads(line)
    return Answer(RUNNING if said["go_on"] else CALLBACK, said["metrics"])
