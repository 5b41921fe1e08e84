"""Keeps one rank on a node of a Ray cluster: starts its process, and answers the launcher's questions."""

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
from lockstep.core.machine import fix_hashes
from lockstep.core.process import PARENT_VARIABLE, adopt_orphans, kill_children, kill_session
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import MEMORY_VARIABLE, STORE_VARIABLE
from lockstep.launch import native_errors

CHUNK = 1 << 16
MOST = 1 << 20
"""Most bytes of a stream in one answer, give or take a chunk."""


class Place(NamedTuple):
    """Where an actor is: its node, the node's address, and the ids of the GPUs that Ray gave to the actor."""

    node: str
    address: str
    gpus: tuple[str, ...]


class Told(NamedTuple):
    """What a rank has written since the last poll, and how it ended if it has.

    Attributes:
        stdout: what it wrote to standard output.
        stderr: what it wrote to standard error.
        native: what libraries wrote to standard error; see :mod:`lockstep.launch.native_errors`.
        code: its exit code, ``-n`` if signal ``n`` killed it; None while it runs, or has more output.
        message: its message file's content, once it has ended; None if it left none.
        done: what it has said if it is done, else 0; see :class:`~lockstep.core.done.DoneFile`.
    """

    stdout: bytes
    stderr: bytes
    native: bytes
    code: int | None
    message: str | None
    done: int


class RankActor:
    """Holds one rank, which dies with this actor's process; that dies with its node or with the launcher."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: list[int] = []
        self._directory, self._stack = Path(), contextlib.ExitStack()
        self._adopts = False
        self._done = DoneFile(None)

    def place(self) -> Place:
        """Returns where this actor is, and makes its process adopt the processes that its rank leaves behind."""
        import ray

        adopt_orphans()
        self._adopts = True
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpus)))

    def free_port(self, address: str) -> int:
        """Finds a free port at an address of this node."""
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
            own: the rank's own variables.
            environment: all other variables; None: those of this process, which Ray started.
            directory: its working directory, if that exists here; None: this process's.
        """
        self._directory = self._stack.enter_context(temporary_directory())
        file = self._directory / "assignment.json"
        file.write_text(assignment, encoding="utf-8")
        foreign = (MEMORY_VARIABLE, STORE_VARIABLE, "TORCHELASTIC_", native_errors.VARIABLE)
        given = os.environ if environment is None else environment
        variables = {name: value for name, value in given.items() if not name.startswith(foreign)} | dict(own)
        variables |= {"TORCHELASTIC_ERROR_FILE": str(self._message), PARENT_VARIABLE: str(os.getpid())}
        fix_hashes(variables)
        self._done = DoneFile(self._message)
        self._stack.callback(self._done.close)
        reading, writing = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a child inherits the mask
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
        """Returns what is new of the rank, without waiting; if it has ended, kills what it has started."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            kill_session(self._process.pid)
        stdout, stderr, native = (_read(stream) for stream in self._streams)
        if code is None or max(map(len, (stdout, stderr, native))) >= MOST:
            return Told(stdout, stderr, native, None, None, 0)
        message = self._message.read_text() if self._message.is_file() else None
        return Told(stdout, stderr, native, code, message, self._done.told())

    def send(self, number: int) -> None:
        """Sends the rank a signal if it runs."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Ends the rank and everything that it has started, and removes its files here."""
        if self._process is not None:
            kill_session(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        if self._adopts:
            kill_children()
        self._stack.close()


def _read(stream: int) -> bytes:
    """Reads what is there without waiting, up to about ``MOST`` bytes."""
    found = b""
    with contextlib.suppress(BlockingIOError, OSError):
        while len(found) < MOST and (chunk := os.read(stream, CHUNK)):
            found += chunk
    return found
