"""Starts the ranks of a run on this machine, for a launcher that imports no framework: ``python -m … FD SETTINGS``.

The launcher talks to this process by lines of JSON over a socket. Ranks are forked from it where that is safe (it has
then imported their engine and computed nothing), else they are fresh processes. It ends when the launcher does, and
takes along every process that its ranks have started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from lockstep.core.process import (
    EXIT_FAILURE,
    PARENT_VARIABLE,
    adopt_orphans,
    end_with_parent,
    kill_children,
    kill_session,
    name_process,
)
from lockstep.core.topology import LAUNCHER_VARIABLE

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
LOOK_SECONDS = 1.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries that are loaded with these start no threads, which a fork would lose."""


class Channel:
    """Exchanges JSON values, a line each, over a socket.

    Args:
        connection: a stream socket, which this object closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def fileno(self) -> int:
        """The socket's descriptor, for ``select``."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        """Send a value; one that nobody is there to read any more is dropped."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Any:
        """Wait for the next value.

        Raises:
            TimeoutError: none came within ``seconds``.
            EOFError: the other side is gone.
        """
        while b"\n" not in self._buffer:
            if not select.select([self._connection], [], [], seconds)[0]:
                raise TimeoutError
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close the socket; the other side reads end-of-file."""
        self._connection.close()


@dataclass(frozen=True)
class ServerSettings:
    """What a launcher tells its server when it starts it.

    Attributes:
        parent: the launcher's process id.
        engine: whose modules are loaded before anything is asked; None: none are.
        forks: whether ranks may be forked from the server; else they are fresh processes.
        store: whether PyTorch's store, in which ranks meet, lives in the server.
        environment: the launcher's values of the variables in ``ONE_THREAD``, which ranks get back.
    """

    parent: int
    engine: str | None
    forks: bool
    store: bool
    environment: dict[str, str | None]

    def to_json(self) -> str:
        """One command-line argument."""
        return json.dumps(asdict(self))


class Server:
    """Answers a launcher: ``check``, ``start``, ``signal``, ``kill``.

    Args:
        channel: to the launcher.
        settings: what it said.
    """

    def __init__(self, channel: Channel, settings: ServerSettings) -> None:
        self._channel, self._settings = channel, settings
        self._ranks: dict[int, int] = {}
        self._kept: list[Any] = []
        self._awake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._awake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Answer until the launcher has had enough, or is gone; then nothing is left of the ranks."""
        try:
            while True:
                ready, _, _ = select.select([self._channel, self._awake], [], [], LOOK_SECONDS)
                if self._awake in ready:
                    os.read(self._awake, 1 << 12)
                self._collect()
                if os.getppid() != self._settings.parent:
                    return
                if self._channel in ready and not self._answer(self._channel.receive()):
                    return
        except EOFError:
            return
        finally:
            self.end()

    def end(self) -> None:
        """Kill every rank, and whatever ranks have started, at once."""
        for pid in self._ranks:
            kill_session(pid)
        self._ranks.clear()
        kill_children()

    def _answer(self, message: Mapping[str, Any]) -> bool:
        if "check" in message:
            self._channel.send({"checked": self._in_child(message["check"])})
        elif "start" in message:
            self._start(**message["start"])
        elif "signal" in message:
            for pid in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, message["signal"])
        elif "kill" in message:
            return False
        return True

    # --- checks -------------------------------------------------------------------------------------------------

    def _in_child(self, check: Mapping[str, Any]) -> dict[str, str] | None:
        """Run ``module.function(**arguments)`` in a child; what it raised as ``{kind: message}``, or None."""
        reading, writing = os.pipe()
        pid = self._fork()
        if pid == 0:
            _leave_quietly(lambda: _tell(writing, _failure_of(check)))
        os.close(writing)
        said = self._hear(reading, pid)
        os.close(reading)
        kill_session(pid)
        _, status = os.waitpid(pid, 0)
        if said:
            return json.loads(said)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return {"RunError": f"a process that made the environment to look at it {how}"}

    def _hear(self, reading: int, pid: int) -> bytes:
        """What a child writes until it has ended; what it leaves behind may hold the pipe open for longer."""
        said = b""
        while True:
            over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            while select.select([reading], [], [], 0 if over else LOOK_SECONDS / 20)[0]:
                chunk = os.read(reading, 1 << 16)
                if not chunk:
                    return said
                said += chunk
            if over:
                return said
            if os.getppid() != self._settings.parent:
                raise EOFError

    # --- ranks --------------------------------------------------------------------------------------------------

    def _start(
        self,
        nproc: int,
        arguments: Sequence[str] | None,
        assignment: str | None,
        log_dir: str,
        environment: Mapping[str, str],
    ) -> None:
        """Start ranks, of ``python ARGUMENTS`` or by ``assignment``, and tell the launcher their process ids."""
        port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if not self._settings.store and hasattr(socket, "SO_REUSEPORT"):
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # rank 0 listens on it beside us
        port.bind((LOOPBACK, 0))
        number = port.getsockname()[1]
        if self._settings.store:
            port.listen(BACKLOG)
        elif not hasattr(socket, "SO_REUSEPORT"):
            port.close()
        common = self._environment(nproc, number) | dict(environment)
        for rank in range(nproc):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own["TORCHELASTIC_ERROR_FILE"] = str(Path(log_dir) / f"rank_{rank}.json")
            if assignment is not None and self._settings.forks:
                pid = self._fork_rank(common | own, assignment, port)
            else:
                words = arguments or ["-m", "lockstep.launch.rank", str(assignment)]
                pid = _spawn(words, common | own)
            self._ranks[pid] = rank
        self._channel.send({"started": {str(rank): pid for pid, rank in self._ranks.items()}, "port": number})
        if self._settings.store:  # after the forks: it has threads, and may have PyTorch to import
            threading.Thread(target=self._serve_store, args=(number, port.detach()), daemon=True).start()
        else:
            self._kept.append(port)

    def _serve_store(self, port: int, listener: int) -> None:
        """Hold PyTorch's store; ranks that could only wait for one in vain are ended."""
        try:
            store = importlib.import_module("lockstep.torch_engine.distributed.store")
            self._kept.append(store.serve_store(LOOPBACK, port, listener))
        except Exception:
            traceback.print_exc()
            for pid in self._ranks:
                kill_session(pid)

    def _environment(self, nproc: int, port: int) -> dict[str, str]:
        given = {name: value for name, value in self._settings.environment.items() if value is not None}
        rest = {k: v for k, v in os.environ.items() if k not in ONE_THREAD and not k.startswith("TORCHELASTIC_")}
        place = {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            LAUNCHER_VARIABLE: "1",
        }
        if self._settings.store:
            place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "lockstep"}
        return rest | given | place

    def _fork_rank(self, environment: Mapping[str, str], assignment: str, port: socket.socket) -> int:
        pid = self._fork()
        if pid == 0:
            _leave_quietly(lambda: self._be_rank(environment, assignment, port))
        return pid

    def _be_rank(self, environment: Mapping[str, str], assignment: str, port: socket.socket) -> int:
        port.close()
        os.environ.clear()
        os.environ.update(environment)
        name_process(f"lockstep rank {environment['RANK']}")
        from lockstep.core.topology import from_environment
        from lockstep.launch.rank import Assignment, run_rank

        return run_rank(Assignment.from_json(assignment), from_environment())

    def _fork(self) -> int:
        """Fork; in the child, which has a session of its own and dies with us, nothing of the server is left open."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        end_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._channel.close()
        os.close(self._awake)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as in a fresh process: not the same numbers in every rank
        return 0

    def _collect(self) -> None:
        """Tell the launcher which ranks have ended, and end what they left behind."""
        for pid in list(self._ranks):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_session(pid)  # before the number can be given to another process
            _, status = os.waitpid(pid, 0)
            self._channel.send({"ended": self._ranks.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _spawn(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a fresh process of ``python ARGUMENTS`` in a session of its own; its process id."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**environment, PARENT_VARIABLE: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # the server collects it itself
    return process.pid


def _failure_of(check: Mapping[str, Any]) -> dict[str, str] | None:
    """What ``module.function(**arguments)`` raises, as ``{kind: message}``: an error of the user's, or a traceback."""
    try:
        getattr(importlib.import_module(check["module"]), check["function"])(**check["arguments"])
    except ValueError as error:
        return {"ValueError": str(error)}
    except OSError as error:
        return {"OSError": str(error)}
    except Exception as error:
        kind = "RunError" if type(error).__module__ == "lockstep.core.errors" else "Traceback"
        return {kind: str(error) if kind == "RunError" else traceback.format_exc()}
    return None


def _tell(descriptor: int, value: Any) -> int:
    os.write(descriptor, json.dumps(value).encode())
    return 0


def _leave_quietly(body: Callable[[], int]) -> NoReturn:
    """End this forked process with what ``body`` returns, without the server's own way out."""
    code = EXIT_FAILURE
    try:
        code = body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def one_thread() -> bool:
    """Whether this process has one thread, so that a fork loses none."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


def main() -> None:
    """Serve the launcher on the other end of the socket ``sys.argv[1]``."""
    settings = ServerSettings(**json.loads(sys.argv[2]))
    end_with_parent(settings.parent, signal.SIGTERM)
    name_process("lockstep server")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(channel.fileno(), False)
    adopt_orphans()
    if settings.engine is not None:
        importlib.import_module(f"lockstep.{settings.engine}_engine.train")
        import gc

        gc.freeze()  # so that a collection in a rank copies none of the pages that all share
    if settings.forks and not one_thread():
        settings = replace(settings, forks=False)
    server = Server(channel, settings)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the launcher's death: seen when its number isn't our parent's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.serve()


if __name__ == "__main__":
    main()
