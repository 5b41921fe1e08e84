"""A process that has imported what ``lockstep`` commands import, and forks one for each that a test asks for.

It has one thread and has computed nothing. A forked process takes the place in everything that can be seen of a process
that was started: arguments, environment variables (also in ``/proc``), directory, handles, signals, and how it ends.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

SPACE = "COMMAND_SERVER_SPACE"
"""A variable that only makes room: a forked process writes its own variables over those of its server."""

PRELOADED = (
    *("lockstep.commands.train", "lockstep.config.help", "lockstep.runs.trackers", "tensorboard", "safetensors.numpy"),
    *("gymnasium.vector", "torch", "torch.distributed.elastic.multiprocessing", "lockstep.torch_engine.train"),
    *("jax", "equinox", "optax", "lockstep.jax_engine.train"),
)
REQUEST_BYTES = 1 << 20


def _write_variables(variables: dict[str, str], set_by_modules: dict[str, str]) -> None:
    """Replaces the process's environment variables: ``os.environ``, C's, and those that ``/proc`` shows of it."""
    os.environ.clear()
    os.environ.update(variables | set_by_modules)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
    assert len(text) <= end - start, f"{len(text)} bytes of variables, and room for {end - start}"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _become(request: dict[str, Any], handles: list[int], set_by_modules: dict[str, str]) -> None:
    """Turns a forked process into the one that was asked for, with all that it would have imported."""
    if request["new_session"]:
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(request["cwd"])
    for target, handle in enumerate(handles):
        os.dup2(handle, target)
        os.close(handle)
    _write_variables(request["variables"], set_by_modules)
    sys.argv = ["-m", *request["words"]]
    sys.orig_argv = [sys.executable, "-m", "lockstep", *request["words"]]
    sys.path[0] = request["cwd"]
    importlib.invalidate_caches()


class Server:
    """Forks processes on request, and says how they ended; see :meth:`serve`.

    Args:
        address: of the socket that it listens on.
        set_by_modules: environment variables that imported modules have set.
    """

    def __init__(self, address: str, set_by_modules: dict[str, str]) -> None:
        self._set_by_modules = set_by_modules
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)  # ends when whoever started us does

    def serve(self) -> dict[str, Any] | None:
        """Answers requests; returns one, in the process that was forked for it, and None here when it is over."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._fork(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif key.fileobj is sys.stdin:
                    return None
                else:
                    self._tell_end(*key.data)
                    self._selector.unregister(key.fileobj)
                    os.close(key.fd)

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        message, handles, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not sys.stdin:
                    os.close(key.fd)
                if key.data is not None:
                    key.data[1].close()
            self._selector.close()
            connection.close()
            _become(request, handles, self._set_by_modules)
            return request
        for handle in handles:
            os.close(handle)
        connection.send(str(pid).encode())
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
        return None

    @staticmethod
    def _tell_end(pid: int, connection: socket.socket) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, suppress(OSError):  # nobody may wait for it any more
            connection.send(str(code).encode())


def _end(code: Any) -> None:
    """Ends the process as Python does, but for taking the modules apart, which takes longer than many a command."""
    if not isinstance(code, int):
        sys.exit(code)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> None:
    """Serves at the address that is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = dict(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    set_by_modules = {name: value for name, value in os.environ.items() if before.get(name) != value}
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"can't fork with {len(threads)} threads"
    gc.collect()
    gc.freeze()
    server = Server(sys.argv[1], set_by_modules)
    print("ready", flush=True)
    if server.serve() is not None:
        try:
            runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            _end(ended.code)


if __name__ == "__main__":
    main()
