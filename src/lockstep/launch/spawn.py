"""Gives the launcher access to the process that starts ranks (:mod:`lockstep.launch.serving.server`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config.run import Config
from lockstep.core import errors
from lockstep.core.process import kill_session, killed_by, read_failure, write_failure
from lockstep.launch.serving.channel import FILE, ONE_THREAD, PORT, Channel, ServerSettings

KILL_SECONDS = 5.0
KILLED = -signal.SIGKILL


class RankServer:
    """Starts a server of ranks and talks to it; the server loads the engine while this process goes on.

    Args:
        engine: the server loads its modules at once, so that checks can use them; None: it loads none.
        forks: whether ranks may be forked from the server; if that turns out unsafe, they are fresh processes.
        meeting: how the ranks meet: ``FILE``, ``STORE`` or ``PORT``.
        stdin: the server's standard input, which a script's ranks read as well; None: this process's.
    """

    def __init__(
        self,
        engine: str | None = None,
        *,
        forks: bool = False,
        meeting: str = PORT,
        stdin: int | None = subprocess.DEVNULL,
    ) -> None:
        ours, theirs = socket.socketpair()
        given = {name: os.environ.get(name) for name in ONE_THREAD}
        settings = ServerSettings(os.getpid(), engine, forks, meeting, given)
        words = ("-P", "-m", "lockstep.launch.serving.server", str(theirs.fileno()), json.dumps(asdict(settings)))
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **ONE_THREAD},
            stdin=stdin,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # this process passes Ctrl-C on
        )
        theirs.close()
        self._began_with = dict(os.environ)
        self.channel = Channel(ours)
        self.closed = False

    def check(self, module: str, function: str, **arguments: Any) -> bool:
        """Calls ``module.function(**arguments)`` with JSON values in a child of the server, where the engine is loaded.

        Returns:
            Whether it was called; it isn't if the server can't be forked.

        Raises:
            ValueError: the function raised it.
            OSError: the function raised it.
            RunError: the function raised it, or the child or the server died.
            RuntimeError: the function raised another error, of which this is the traceback.
        """
        if sys.platform != "linux":
            return False
        self.channel.send({"check": {"module": module, "function": function, "arguments": arguments}})
        failure = self._answer()["checked"]
        for kind, message in (failure or {}).items():
            if kind == "Traceback":
                raise RuntimeError(message)
            raise {"ValueError": ValueError, "OSError": OSError}.get(kind, errors.RunError)(message)
        return failure is not None

    def start(
        self,
        nproc: int,
        log_dir: Path,
        *,
        assignment: str | None = None,
        arguments: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ServedRanks:
        """Starts ranks, which meet as the server was told; for a port, the kernel chooses one on loopback.

        Args:
            nproc: number of ranks.
            log_dir: where failing ranks leave their messages.
            assignment: what ranks train, as JSON; None: they run ``arguments``.
            arguments: the words after ``python``.
            environment: further variables of the ranks.

        Raises:
            RunError: they can't be started, or the server died; one line.
        """
        changed = {name: value for name, value in os.environ.items() if self._began_with.get(name) != value}
        start = {
            "nproc": nproc,
            "arguments": None if arguments is None else list(arguments),
            "assignment": assignment,
            "log_dir": str(log_dir),
            "environment": {**changed, **(environment or {})},
        }
        self.channel.send({"start": start})
        answer = self._answer()
        return ServedRanks(self, {int(rank): pid for rank, pid in answer["started"].items()}, answer["port"], log_dir)

    def _answer(self) -> Any:
        try:
            answer = self.channel.receive()
        except EOFError:
            code, why = self.ended()
            raise (errors.KilledError if code == KILLED else errors.RunError)(why) from None
        if "failed" in answer:
            raise errors.RunError(answer["failed"])
        return answer

    def ended(self) -> tuple[int, str]:
        """Returns the exit code of the server, which has left its channel, and how it ended, in words."""
        code = self._process.wait()
        how = killed_by(-code) if code < 0 else f"ended with exit code {code}"
        return code, f"the process that starts the ranks {how}"

    def end_ranks(self) -> bool:
        """Ends every rank and everything that it has started; returns whether the server can start others."""
        if self.closed:
            return False
        self.channel.send({"end": True})
        try:
            while "over" not in self.channel.receive(KILL_SECONDS):
                pass  # reports of ranks that ended by themselves
        except (EOFError, TimeoutError):
            self.close()
        return not self.closed

    def close(self) -> None:
        """Ends the server, every rank, and everything that ranks have started."""
        if self.closed:
            return
        self.closed = True
        self.channel.send({"kill": True})
        self._process.terminate()  # ends it while it loads the engine; later it only heeds the channel
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.channel.close()

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rank_server(config: Config) -> RankServer:
    """Starts the server for a run's ranks; for engine torch, it loads the engine at once, and forks if that is safe.

    Ranks of engine jax are fresh processes: they compile for seconds anyway, and JAX must not be forked once it has a
    client.

    Raises:
        ValueError: PyTorch is needed and missing; one line.
    """
    if config.engine != "torch":
        return RankServer()
    if importlib.util.find_spec("torch") is None:
        raise ValueError("engine: torch needs torch; pip install 'lockstep-rl[torch]'")
    return RankServer("torch", forks=sys.platform == "linux" and config.device == "cpu", meeting=FILE)


def threads_of(threads: int) -> dict[str, str]:
    """Returns the variable that limits a rank's libraries to ``threads`` threads, or to the user's own value."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


class ServedRanks:
    """The rank processes of one run, children of a server; ``port`` is where they meet, if they use one."""

    def __init__(self, server: RankServer, pids: Mapping[int, int], port: int | None, log_dir: Path) -> None:
        self._server, self._pids, self.port, self._log_dir = server, dict(pids), port, log_dir
        self._codes: dict[int, int] = {}

    def exit_codes(self) -> dict[int, int | None]:
        """Returns ranks' exit codes in the order of their ends: None while a rank runs, ``-n`` for signal ``n``."""
        try:
            while len(self._codes) < len(self._pids):
                if self._server.closed:
                    raise EOFError
                told = self._server.channel.receive(0)
                if "failed" in told:
                    raise errors.RunError(told["failed"])
                self._codes[told["ended"]] = told["code"]
        except TimeoutError:
            pass
        except EOFError:
            why = None if self._server.closed else self._server.ended()[1]
            for rank, pid in self._pids.items():  # they die with their server, but not what they started
                if rank not in self._codes:
                    kill_session(pid)
                    self._codes[rank] = KILLED
                    if why is not None and read_failure(self.message_file(rank)) is None:
                        write_failure(Path(self.message_file(rank)), why, secondary=True)
        return {**self._codes, **{rank: None for rank in self._pids if rank not in self._codes}}

    def message_file(self, rank: int) -> str:
        """Returns the file in which a failing rank leaves its message."""
        return str(self._log_dir / f"rank_{rank}.json")

    def send(self, number: int) -> None:
        """Sends a signal to every running rank."""
        self._server.channel.send({"signal": number})

    def kill(self) -> None:
        """Ends every rank, all that ranks have started, and the server, at once."""
        self._server.close()

    def end(self) -> None:
        """Ends every rank, and all that ranks have started, at once; the server goes on if it can."""
        self._server.end_ranks()
