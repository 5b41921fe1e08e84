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
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

SPACE = "COMMAND_SERVER_SPACE"
"""A variable that only makes room: a forked process writes its own variables over those of its server."""

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
FROM_THE_BEGINNING = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "JAX_", "MALLOC_")
"""What counts only where Python or a library begins: a process that is told something else is started from nothing."""

PRELOADED = (
    *(f"lockstep.commands.{name}" for name in ("train", "eval", "verify", "run", "doctor")),
    *("lockstep.envs.arrays.gymnasium_env", "safetensors.numpy", "pydantic.dataclasses", "packaging.version"),
    *("lockstep.runs.trackers.tensorboard", "tensorboard.compat.tensorflow_stub", "s3fs", "imageio.v3"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "gymnasium.vector", "gymnasium.envs.classic_control"),
    *("torch", "torch.distributed.elastic.multiprocessing", "lockstep.torch_engine.train"),
    *("jax", "jaxlib.mlir.dialects.mhlo", "equinox", "optax", "lockstep.jax_engine.train"),
    "lockstep.jax_engine.seeds.train",
)
OPTIMIZATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"
"""How JAX compiles, see ``quick_compiler.py``."""
OF_THE_PRODUCT = (("-m", "lockstep.launch.serving.server"), ("-m", "lockstep.launch.rank"))
ISOLATED = "-P"
"""Python's own option, without the working directory in front of its path: of all that we start."""
CODE_OF_THE_PRODUCT = "import sys; from lockstep.core.process import end_with_parent; "
REQUEST_BYTES = 1 << 20

_set_by_modules: dict[str, str] = {}
_started_with: dict[str, str] = {}
_path = sys.path[1:]
"""But for the directory of this file."""


def from_the_beginning(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that count only where Python or a library begins, but for what a forked process makes up for.

    That is: a number of threads that is 1, and how JAX compiles.
    """
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(FROM_THE_BEGINNING) and name != OPTIMIZATIONS and not (name in ONE_THREAD and value == "1")
    }


def compile_as(variables: Mapping[str, str]) -> None:
    """Has this process compile as one would that was started with these variables, but for XLA's own flags.

    Those count where JAX starts, and are left as they were there.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.__file__ is not None:  # else it is tests/jax, where JAX isn't installed
        jax.config.update("jax_disable_most_optimizations", variables.get(OPTIMIZATIONS) == "1")


def _write_variables(variables: Mapping[str, str]) -> None:
    """Replaces the process's environment variables: ``os.environ``, C's, and those that ``/proc`` shows of it."""
    os.environ.clear()
    os.environ.update({**variables, **_set_by_modules})
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
    assert len(text) <= end - start, f"{len(text)} bytes of variables, and room for {end - start}"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _become(
    words: Sequence[str], variables: Mapping[str, str], cwd: str, new_session: bool, isolated: bool = False
) -> None:
    """Turns a forked process into ``python WORDS``, with all that it would have imported."""
    if new_session:
        os.setsid()
    # Temporary directories of the process that forked it are not this one's to remove.
    weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    _write_variables(variables)
    compile_as(variables)
    sys.orig_argv = [sys.executable, *words]
    sys.argv = [words[0], *words[2:]]
    first = [] if isolated else [cwd if words[0] == "-m" else ""]
    sys.path[:] = [*first, *_path]
    sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()


def _run(words: Sequence[str]) -> NoReturn:
    """Runs ``python WORDS`` in this process, and ends it as Python does, but for taking the modules apart."""
    code = 0
    try:
        if words[0] == "-m":
            if not hasattr(sys.modules.get(words[1]), "__path__"):
                sys.modules.pop(words[1], None)  # it is to be __main__, and nobody has imported it
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _nothing_foreign() -> bool:
    """Whether only installed modules and our own are loaded, none of a user's."""
    known = (sys.prefix, sys.base_prefix, os.path.dirname(sys.modules["lockstep"].__file__ or ""), __file__)
    files = (getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name != "__main__")
    return all(file is None or not os.path.isabs(file) or file.startswith(known) for file in files)


class _Forking(subprocess.Popen):
    """``subprocess.Popen`` that forks this process for one of the product's own, where it is as good as a new one.

    That is: it has one thread and no user's module, and the new one's variables say the same to libraries.
    """

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, variables, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more = rest
        isolated = isinstance(args, list) and args[1:2] == [ISOLATED]
        words = args[2:] if isolated else []
        variables = dict(os.environ if variables is None else variables)
        forks = (
            words
            and args[0] == sys.executable
            and (tuple(words[:2]) in OF_THE_PRODUCT or words[1].startswith(CODE_OF_THE_PRODUCT))
            and not (executable or preexec_fn or shell)
            and from_the_beginning(variables) == _started_with
            and len(os.listdir("/proc/self/task")) == 1
            and _nothing_foreign()
        )
        if not forks:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # pyright: ignore[reportAttributeAccessIssue]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        with (
            warnings.catch_warnings()
        ):  # Python's count of threads is of after the fork, and may hold a library's new one
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*fork")
            self.pid = os.fork()
        if self.pid == 0:
            try:
                for target, handle in enumerate((p2cread, c2pwrite, errwrite)):
                    if handle not in (-1, target):
                        os.dup2(handle, target)
                _close_all_but(pass_fds)
                _become(words, variables, os.path.realpath(cwd or os.getcwd()), bool(more[-2]), isolated)
                _run(words)
            finally:  # never back into what called
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # pyright: ignore[reportAttributeAccessIssue]


def _close_all_but(handles: Sequence[int]) -> None:
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2 and handle not in handles:
            with suppress(OSError):
                os.close(handle)


class Server:
    """Forks processes on request, and says how they ended; see :meth:`serve`.

    Args:
        address: of the socket that it listens on.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)  # ends when whoever started us does

    def serve(self) -> None:
        """Answers requests until nobody is there to ask."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._fork(self._listener.accept()[0])
                elif key.fileobj is sys.stdin:
                    return
                else:
                    self._selector.unregister(key.fileobj)
                    self._tell_end(*key.data)
                    os.close(key.fd)

    def _fork(self, connection: socket.socket) -> None:
        message, handles, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            try:
                for target, handle in enumerate(handles):
                    os.dup2(handle, target)
                _close_all_but(())
                subprocess.Popen = _Forking
                _become(**request)
                _run(request["words"])
            finally:
                os._exit(1)
        for handle in handles:
            os.close(handle)
        connection.send(str(pid).encode())
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))

    @staticmethod
    def _tell_end(pid: int, connection: socket.socket) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, suppress(OSError):  # nobody may wait for it any more
            connection.send(str(code).encode())


def main() -> None:
    """Serves at the address that is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = dict(os.environ)
    _started_with.update(from_the_beginning(before))
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # an engine may not be installed
            importlib.import_module(name)
    _set_by_modules.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"can't fork with {len(threads)} threads"
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=category, module=r"lockstep\b")  # what our own code causes
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # JAX looks at each collection
    server = Server(sys.argv[1])
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
