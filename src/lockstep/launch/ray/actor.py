"""One rank's keeper on its node of a Ray cluster: starts the process, and answers the launcher's questions."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lockstep.core.done import DoneFile
from lockstep.core.process import PARENT_VARIABLE, adopt_orphans, kill_children, kill_session
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import MEMORY_VARIABLE, STORE_VARIABLE
from lockstep.launch import native_errors

CHUNK = 1 << 16
MOST = 1 << 20
"""Bytes of a stream in one answer."""


class Place(NamedTuple):
    """Where an actor is: its node, the node's address, and the GPUs that Ray gave to the actor, by their ids."""

    node: str
    address: str
    gpus: tuple[str, ...]


class Told(NamedTuple):
    """What an actor knows of its rank since it was last asked.

    Attributes:
        stdout: what the rank wrote there.
        stderr: likewise.
        native: what libraries wrote to standard error, see :mod:`lockstep.launch.native_errors`.
        code: its exit code, ``-n`` if signal ``n`` killed it; None: it runs.
        message: its message file, once it has ended; None: it left none.
        done: whether it has said that it is done.
    """

    stdout: bytes
    stderr: bytes
    native: bytes
    code: int | None
    message: str | None
    done: bool


class RankActor:
    """Holds one rank; the rank dies with the process of this actor, which dies with its node or with the launcher."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: list[int] = []
        self._directory, self._stack = Path(), contextlib.ExitStack()
        self._adopts = False
        self._done = DoneFile(None)

    def place(self) -> Place:
        """Tells where this is, in a process of Ray's, which adopts from here on what its rank leaves behind."""
        import ray

        adopt_orphans()
        self._adopts = True
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpus)))

    def free_port(self, address: str) -> int:
        """Finds a port of an address of this node on which nobody listens."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as found:
            found.bind((address, 0))
            return found.getsockname()[1]

    def start(
        self,
        assignment: str,
        own: Mapping[str, str],
        environment: Mapping[str, str] | None,
        directory: str | None,
    ) -> None:
        """Starts the rank.

        Args:
            assignment: what it is to do, as JSON.
            own: its variables.
            environment: all others; None: those of this process, which Ray made.
            directory: where it works, if there is one of that name here; None: where this process does.
        """
        self._directory = self._stack.enter_context(temporary_directory())
        file = self._directory / "assignment.json"
        file.write_text(assignment, encoding="utf-8")
        foreign = (MEMORY_VARIABLE, STORE_VARIABLE, "TORCHELASTIC_", native_errors.VARIABLE)
        given = os.environ if environment is None else environment
        variables = {name: value for name, value in given.items() if not name.startswith(foreign)} | dict(own)
        variables |= {"TORCHELASTIC_ERROR_FILE": str(self._message), PARENT_VARIABLE: str(os.getpid())}
        self._done = DoneFile(self._message)
        self._stack.callback(self._done.close)
        reading, writing = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which a child would inherit
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.launch.rank", str(file)],
                env={**variables, native_errors.VARIABLE: str(writing)},
                cwd=directory if directory is not None and os.path.isdir(directory) else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(writing)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = [self._process.stdout.fileno(), self._process.stderr.fileno(), reading]
        for stream in self._streams:
            os.set_blocking(stream, False)

    @property
    def _message(self) -> Path:
        return self._directory / "rank.json"

    def poll(self) -> Told:
        """Tells what is new of the rank, without waiting; one that has ended is gone with what it started."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            kill_session(self._process.pid)
        stdout, stderr, native = (_read(stream) for stream in self._streams)
        if code is None or max(map(len, (stdout, stderr, native))) >= MOST:
            return Told(stdout, stderr, native, None, None, False)
        message = self._message.read_text() if self._message.is_file() else None
        return Told(stdout, stderr, native, code, message, self._done.told())

    def send(self, number: int) -> None:
        """Sends the rank a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Ends the rank and whatever it has started, and removes what it left here."""
        if self._process is not None:
            kill_session(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        if self._adopts:
            kill_children()
        self._stack.close()


def _read(stream: int) -> bytes:
    """Reads what is there, up to ``MOST`` bytes."""
    found = b""
    with contextlib.suppress(BlockingIOError, OSError):
        while len(found) < MOST and (chunk := os.read(stream, CHUNK)):
            found += chunk
    return found
