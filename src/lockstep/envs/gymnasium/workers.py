"""Steps Gymnasium environments in worker processes that share their buffers with the rank."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import finalize

import numpy as np

from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.process import EXIT_INTERRUPTED, STOP_SIGNALS, end_with_parent, killed_by, stop_signals
from lockstep.core.silence import Stillness
from lockstep.envs.gymnasium.in_process import MAKE_SECONDS
from lockstep.envs.gymnasium.sweep import HUNG_SECONDS, Sweep
from lockstep.envs.host_envs import Buffers, HostEnvs, RowMetrics, WantedEnvs, buffer_layout, cut

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps the working directory off the front of a worker's path until the worker has its rank's path."""
CLOSE_SECONDS = 2.0
"""Seconds that workers may take to close their environments before they are killed, ``HUNG_SECONDS`` after failures."""
COMMANDS_BETWEEN = 32
"""Commands after which a worker sets its handlers of stop signals again."""
START_SECONDS = 60.0
"""Seconds that a worker may take to start Python and load Lockstep, even if ``env.timeout`` is less."""


def _message(*parts: Any) -> bytes:
    """Pickles a message for ``Connection.recv``."""
    return bytes(ForkingPickler.dumps(parts))


_STEP, _DONE = _message("step"), _message("ok", {})
"""The messages of each step, pickled once."""


def _shared(size: int) -> Arena:
    """Allocates ``size`` bytes of memory, all 0, that worker processes map as well.

    It avoids files in ``/dev/shm``, which ``multiprocessing`` uses: in a container that may be missing, read-only or
    small, and a process that writes where there is no room is killed. It uses one only if Linux offers nothing else.
    """
    if not hasattr(os, "memfd_create"):
        return Arena(size)
    try:
        descriptor = os.memfd_create("lockstep-environments")
    except OSError:  # a sandbox may forbid it
        return Arena(size)
    os.ftruncate(descriptor, size)
    arena = Arena(size, descriptor)
    finalize(arena, os.close, descriptor)  # the memory stays mapped
    return arena


def _views(raw: dict[str, Arena], layout: dict[str, tuple[tuple[int, ...], Any]]) -> Buffers:
    return Buffers(**{k: np.frombuffer(raw[k].buffer, d, int(np.prod(s))).reshape(s) for k, (s, d) in layout.items()})


def _serve(sweep: Sweep, command: str, arguments: tuple) -> Any:
    assert command in ("reset", "step", "has_hooks", "save_states", "restore"), command
    return getattr(sweep, command)(*arguments)


def _leave_the_end_to_the_rank(numbers: Iterable[int]) -> None:
    """Has stop signals of these ``numbers`` do nothing in this process.

    By a handler, because a program that an environment starts would inherit ``SIG_IGN`` and couldn't be terminated.
    Most system calls that a signal interrupts are taken up again, by the kernel or by Python.
    """
    for number in numbers:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Blocks stop signals in processes that the block starts, and in this thread until its end.

    Starting the resource tracker would unblock them, so that it is started before.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(*_: object) -> None:
    """Handles a signal."""


def _work(
    connection: Connection,
    raw: dict[str, Arena],
    layout: dict[str, tuple[tuple[int, ...], Any]],
    wanted: WantedEnvs,
    rows: range,
    slot: int,
    parent: int,
) -> None:
    """Runs a worker: makes its environments, answers commands until the rank closes the pipe, closes them."""
    end_with_parent(parent)
    os.environ.pop(_SAFE_PATH, None)
    ours, served = stop_signals(), itertools.count()
    _leave_the_end_to_the_rank(ours)
    sweep: Sweep | None = None
    try:
        buffers = _views(raw, layout)
        buffers.heartbeats[slot] += 1  # from here on the time limits are those of the environments
        sweep = Sweep(wanted, buffers, rows, slot)
        connection.send(("ok", None))
        while True:
            if next(served) % COMMANDS_BETWEEN == 0:
                _leave_the_end_to_the_rank(ours)  # again, as an environment may have set handlers of its own
            command, *arguments = connection.recv()
            answer = _serve(sweep, command, tuple(arguments))
            connection.send_bytes(_DONE if command == "step" and not answer else _message("ok", answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        known = isinstance(error, EnvironmentFailureError | ValueError)
        with contextlib.suppress(OSError):  # the rank may have failed for another environment already
            connection.send(("failed", str(error) if known else f"worker {slot}: {type(error).__name__}: {error}"))
    finally:
        if sweep is not None:
            sweep.close()


def _joined(answers: Mapping[int, RowMetrics]) -> RowMetrics:
    """Merges what environments of several workers state."""
    return {row: said for env_metrics in answers.values() for row, said in env_metrics.items()}


def _ended_how(code: int | None) -> str:
    """Says how a worker that was still needed has ended."""
    if code == EXIT_INTERRUPTED:
        return "was interrupted"
    if code == 0:
        return "ended before the run was done (exit code 0); the environment may have called exit"
    if code is not None and code < 0:
        return killed_by(-code)
    return f"died (exit code {code})"


class WorkerEnvs(HostEnvs):
    """Steps environments in ``workers`` processes, at most one per environment.

    Observations, actions and rewards lie in shared memory.
    """

    in_workers = True

    def __init__(self, wanted: WantedEnvs, workers: int) -> None:
        count = len(wanted.env_ids)
        workers = min(workers, count)
        layout = buffer_layout(wanted.description, count, workers)
        context = multiprocessing.get_context("spawn")
        raw = {k: _shared(max(1, int(np.prod(s)) * np.dtype(d).itemsize)) for k, (s, d) in layout.items()}
        super().__init__(wanted.description, wanted.env_ids, _views(raw, layout))
        self._timeout = wanted.config.timeout
        self._bounds = [count * w // workers for w in range(workers + 1)]
        self._parts = cut(count, wanted.shard_size if wanted.in_parts else None, workers)
        self._slots = [range(workers * p.start // count, workers * p.stop // count) for p in self._parts]
        self._polls: dict[Sequence[int], select.poll] = {}
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._slot_of: dict[int, int] = {}
        saved = {name: os.environ.get(name) for name in (*_THREAD_VARIABLES, _SAFE_PATH)}
        os.environ.update(dict.fromkeys(saved, "1"))
        try:
            for slot, (first, last) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
                ours, theirs = context.Pipe()
                arguments = (theirs, raw, layout, wanted, range(first, last), slot, os.getpid())
                process = context.Process(target=_work, args=arguments, name=f"environments-{slot}", daemon=True)
                with _stop_signals_blocked():  # until the worker handles them
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
                self._slot_of[ours.fileno()] = slot
        finally:
            for name, value in saved.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        atexit.register(self.close)
        self._made = False
        self._collect(range(workers))
        self._made = True

    def _name(self, slot: int) -> str:
        row = int(self.buffers.stepping[slot])
        row = row if row >= 0 else self._bounds[slot]
        return f"environment {self.env_ids[row]} ({self.description.id}), worker process {slot}"

    def _collect(self, slots: Sequence[int]) -> dict[int, Any]:
        """Waits for one answer of each worker; raises an error that names the environment that failed, died or hung."""
        answers: dict[int, Any] = {}
        look = min(1.0, self._timeout / 4)
        poll, beats = self._poll(slots), dict[int, Stillness]()
        while len(answers) < len(slots):
            ready = poll.poll(1000 * look)
            if not ready:
                beats = beats or {slot: Stillness(2 * look) for slot in slots}
                self._check_heartbeats(beats, [slot for slot in slots if slot not in answers])
            for number, _ in ready:
                slot = self._slot_of[number]
                answers[slot] = self._receive(slot)  # raises if it has answered already: then it has ended
                life.progressed()
        return answers

    def _poll(self, slots: Sequence[int]) -> select.poll:
        """Returns the poll object of some workers, which is made once."""
        if slots not in self._polls:
            self._polls[slots] = select.poll()
            for slot in slots:
                self._polls[slots].register(self._connections[slot].fileno(), select.POLLIN)
        return self._polls[slots]

    def _check_heartbeats(self, beats: Mapping[int, Stillness], waiting: Iterable[int]) -> None:
        """Raises for the first worker whose environment has not moved for longer than the limit.

        Time in which this process and its workers are stopped doesn't count.
        """
        for slot in sorted(waiting):
            heartbeats = int(self.buffers.heartbeats[slot])
            seconds = beats[slot].look((heartbeats, int(self.buffers.stepping[slot])))
            limit = self._limit(heartbeats > 0)
            if seconds == 0.0:
                life.progressed()
            elif seconds > limit:
                name = self._name(slot)
                self.close(HUNG_SECONDS)
                if not heartbeats:
                    raise EnvironmentFailureError(
                        f"worker process {slot} of {self.description.id} didn't start within {limit:g} s; a longer "
                        "env.timeout gives it more"
                    )
                if not self._made:
                    raise EnvironmentFailureError(
                        f"{name}, wasn't made within {limit:g} s; a longer env.timeout gives it more"
                    )
                raise EnvironmentFailureError(f"{name}, didn't answer within {limit:g} s (env.timeout)")

    def _limit(self, started: bool) -> float:
        """Returns the seconds that a worker may take to start, then to make an environment, then for each answer."""
        if not started:
            return max(self._timeout, START_SECONDS)
        return self._timeout if self._made else max(self._timeout, MAKE_SECONDS)

    def _receive(self, slot: int) -> Any:
        try:
            status, value = self._connections[slot].recv()
        except (EOFError, ConnectionResetError):
            self._processes[slot].join(1)
            how = _ended_how(self._processes[slot].exitcode)
            self.close(HUNG_SECONDS)
            raise EnvironmentFailureError(f"{self._name(slot)}, {how}") from None
        if status == "failed":
            self.close(HUNG_SECONDS)
            raise EnvironmentFailureError(value)
        return value

    def _send(self, slots: Sequence[int], message: bytes) -> None:
        for slot in slots:
            try:
                self._connections[slot].send_bytes(message)
            except (BrokenPipeError, ConnectionResetError):
                self._receive(slot)

    def _command(self, *command: Any) -> dict[int, Any]:
        everyone = range(len(self._connections))
        self._send(everyone, _message(*command))
        return self._collect(everyone)

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        self._command("reset")

    def step(self) -> None:
        """See :meth:`HostEnvs.step`."""
        self.env_metrics = _joined(self._command("step"))

    @property
    def parts(self) -> list[slice]:
        """See :attr:`HostEnvs.parts`."""
        return self._parts

    def begin_step(self, part: int = 0) -> None:
        """See :meth:`HostEnvs.begin_step`."""
        self._send(self._slots[part], _STEP)

    def end_step(self, part: int = 0) -> None:
        """See :meth:`HostEnvs.end_step`."""
        self.env_metrics = _joined(self._collect(self._slots[part]))

    def has_hooks(self) -> bool:
        """See :meth:`HostEnvs.has_hooks`."""
        return any(self._command("has_hooks").values())

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`."""
        answers = self._command("save_states")
        return [state for slot in sorted(answers) for state in answers[slot]]

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`."""
        slot = next(s for s in range(len(self._processes)) if env < self._bounds[s + 1])
        self._send([slot], _message("restore", env, actions, hashes, state))
        return self._collect(range(slot, slot + 1))[slot]

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """See :meth:`HostEnvs.close`; workers have ``patience`` seconds to close their environments."""
        atexit.unregister(self.close)
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join(5)
