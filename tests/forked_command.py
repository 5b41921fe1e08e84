"""Commands in processes that are forked from one that has imported everything, see ``command_server.py``."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from command_server import ONE_THREAD, SPACE, from_the_beginning

FORKS = sys.platform == "linux" and hasattr(os, "pidfd_open") and not os.environ.get("LOCKSTEP_TESTS_FRESH")
"""Whether commands can be forked; ``LOCKSTEP_TESTS_FRESH=1`` starts each from nothing instead."""


class Server:
    """A server of this process, which ends with it.

    Args:
        variables: environment variables that the modules of commands are imported with.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._beginning = from_the_beginning(variables)
        self._directory = tempfile.TemporaryDirectory(prefix="commands-")
        self._address = str(Path(self._directory.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("command_server.py")), self._address],
            env={**variables, **dict.fromkeys(ONE_THREAD, "1"), SPACE: "x" * 20_000},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server of commands doesn't start"

    def can_fork(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these variables is one that could be forked from this server's."""
        return from_the_beginning(variables) == self._beginning

    def fork(self, request: Mapping[str, Any], handles: Sequence[int]) -> tuple[int, socket.socket]:
        """The id of a process that is forked now, and the connection that will say how it ended."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._address)
        socket.send_fds(connection, [json.dumps(request).encode()], list(handles))
        return int(connection.recv(64)), connection


class ForkedCommand:
    """``lockstep WORDS`` in a forked process, with the part of ``subprocess.Popen`` that tests use.

    Args:
        server: that forks it.
        words: of the command line.
        cwd: its directory.
        variables: all its environment variables.
        new_session: whether it leads a session of its own.
        isolated: whether the working directory stays off Python's path, as with ``-P``.
    """

    def __init__(
        self,
        server: Server,
        words: Sequence[str],
        cwd: Path,
        variables: Mapping[str, str],
        new_session: bool,
        isolated: bool = False,
    ) -> None:
        self.args = ["lockstep", *words]
        self.returncode: int | None = None
        request = {
            "words": ["-m", "lockstep", *words],
            "variables": variables,
            "cwd": os.path.realpath(cwd),
            "new_session": new_session,
            "isolated": isolated,
        }
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        theirs = [os.open(os.devnull, os.O_RDONLY), its_out, its_err]
        try:
            self.pid, self._connection = server.fork(request, theirs)
        finally:
            for handle in theirs:
                os.close(handle)
        self._said = {out: b"", err: b""}
        self._open = [out, err]

    def take_pipes(self) -> tuple[int, int]:
        """The handles of its standard output and error, which whoever takes them closes."""
        out, err = self._open
        self._open = []
        return out, err

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, ``-n`` if signal ``n`` ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its end may not have been told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it printed, once it has ended and nobody else can print there.

        Raises:
            subprocess.TimeoutExpired: somebody still can after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._open:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(self._open, [], [], left)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            for handle in ready:
                part = os.read(handle, 1 << 16)
                self._said[handle] += part
                if not part:
                    self._open.remove(handle)
                    os.close(handle)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        stdout, stderr = (text.decode() for text in self._said.values())
        return stdout, stderr


class ForkedCall:
    """The process of a call from Python, with the part of ``subprocess.Popen`` that ``lockstep.python.command`` uses.

    Args:
        server: that forks it.
        words: of the command line.
        variables: all its environment variables.
        stdout: ``subprocess.DEVNULL`` or ``subprocess.PIPE``.
        tells: a file descriptor that its exit status is written to, as a started one does.
    """

    def __init__(
        self, server: Server, words: Sequence[str], variables: Mapping[str, str], stdout: int, tells: int
    ) -> None:
        self._command = ForkedCommand(server, words, Path.cwd(), variables, new_session=True, isolated=True)
        out, err = self._command.take_pipes()
        self.stderr = os.fdopen(err, errors="replace")
        self.stdout = os.fdopen(out, errors="replace") if stdout == subprocess.PIPE else None
        if self.stdout is None:
            threading.Thread(target=_empty, args=(out,), daemon=True).start()
        self.pid, self.send_signal, self._tells = self._command.pid, self._command.send_signal, os.dup(tells)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._told(self._command.poll())

    def wait(self) -> int | None:
        """The exit code."""
        return self._told(self._command.wait())

    def _told(self, code: int | None) -> int | None:
        if code is not None and self._tells != -1:
            os.write(self._tells, str(code).encode())
            os.close(self._tells)
            self._tells = -1
        return code

    @property
    def returncode(self) -> int | None:
        return self._command.returncode


def _empty(handle: int) -> None:
    """Reads what nobody wants, to its end."""
    with os.fdopen(handle, "rb") as stream:
        while stream.read(1 << 16):
            pass
