"""Prepares and times calls of a compiled program: how many iterations each runs, its inputs, and how long it took."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.jax_engine.distributed.mesh import Mesh, replicate_sharding
from lockstep.jax_engine.distributed.placement import place, shard_rows
from lockstep.jax_engine.program.iterations import Inputs, Outputs, coefficients_of, learning_rates

STEPS_PER_CALL = 1 << 15
MOST_PER_CALL = 16
LAST_SECONDS = 60.0
"""How long a process that ends waits for a call under way."""


def iterations_per_call(config: Config) -> int:
    """Returns how many iterations a call runs: several if they are short, so that calls cost little."""
    return max(1, min(MOST_PER_CALL, STEPS_PER_CALL // config.steps_per_iteration, config.num_iterations))


def no_matter() -> None:
    """Does nothing; the default for what is called before a state is taken over."""


@dataclass(frozen=True)
class Pending:
    """A call of ``count`` iterations that is under way, begun after ``first`` iterations."""

    first: int
    count: int
    outputs: Outputs


class Share(NamedTuple):
    """An iteration's share of its call, equal for all of them; ``ended`` is by the monotonic clock."""

    seconds: float
    ended: float


class CallClock:
    """Times calls that are started one ahead, from the end of the call before, or from the start if none was under way.

    Time that the host needs between two such calls counts for the second. A thread waits for the calls to end. The host
    can't time them itself: where a call only returns when its loop is nearly over, as on a GPU, it reads one call's
    outputs when the next is done, and a run's last call would seem to take no time.
    """

    THREAD = "lockstep calls"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._mark, self._open = clock, clock(), 0
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._ends: SimpleQueue[float] = SimpleQueue()
        given = (self._calls, self._ends, clock)
        watch = threading.Thread(target=_watch, args=given, daemon=True, name=self.THREAD)
        watch.start()
        weakref.finalize(self, _leave, watch, self._calls)  # at the latest when Python ends

    def begins(self) -> None:
        """Notes that a call is about to begin."""
        if not self._open:
            self._mark = self._clock()
        self._open += 1

    def follow(self, outputs: Any) -> None:
        """Waits in the thread for the end of the call that has begun.

        ``outputs`` are arrays of it that no call takes over.
        """
        self._calls.put(outputs)

    def shares(self, count: int) -> list[Share]:
        """Waits for the oldest call that was followed; returns the share of each of its ``count`` iterations."""
        self._open -= 1
        began, self._mark = self._mark, self._ends.get()
        seconds = (self._mark - began) / count
        return [Share(seconds, self._mark - seconds * later) for later in reversed(range(count))]


def _watch(calls: SimpleQueue[Any], ends: SimpleQueue[float], clock: Callable[[], float]) -> None:
    while (outputs := calls.get()) is not None:
        with contextlib.suppress(Exception):  # the host gets the error when it reads them
            jax.block_until_ready(outputs)
        del outputs
        ends.put(clock())


def _leave(watch: threading.Thread, calls: SimpleQueue[Any]) -> None:
    """Ends the thread, because a thread that returns from XLA after Python has ended would abort the process."""
    calls.put(None)
    if watch is not threading.current_thread():
        watch.join(LAST_SECONDS)


class CallInputs:
    """Places the inputs of a program's calls on its mesh: iterations, their rates, and whether to stop.

    Placing a small array on several devices takes about as long as logging an iteration, so inputs that didn't change
    since the last call are reused.
    """

    def __init__(self, config: Config, mesh: Mesh, local_devices: int) -> None:
        self._config, self._mesh, self._local_devices = config, mesh, local_devices
        self._capacity = iterations_per_call(config)
        self._placed: dict[str, tuple[bytes, Array]] = {}

    def __call__(self, first: int, count: int, stop: int, before: int = 0) -> tuple[Inputs, Array, Array]:
        """Places inputs ``[capacity]`` of ``count`` iterations, a stop code ``[devices]``, and ``count`` ``[]``.

        ``first`` iterations were done before. ``before`` are those of earlier runs, whose random numbers aren't drawn
        again.
        """
        capacity, numbers = self._capacity, self._numbers(before + first)
        rates = learning_rates(self._config, first, capacity)
        scheduled = coefficients_of(self._config, first, capacity)
        coefficients = (
            None if scheduled is None else {name: self._same(name, values) for name, values in scheduled.items()}
        )
        inputs = Inputs(self._same("iteration", numbers), self._same("learning_rate", rates), coefficients)
        stops = self._kept("stop", np.full(self._local_devices, stop, np.int32), lambda x: shard_rows(x, self._mesh))
        return inputs, stops, self._same("count", np.asarray(count, np.int32))

    def follows(self, first: int, numbers: Array, before: int = 0) -> None:
        """Stores the numbers of the iterations after ``first``, which a call has left on the mesh."""
        self._placed["iteration"] = self._numbers(before + first).tobytes(), numbers

    def _numbers(self, start: int) -> np.ndarray:
        return np.arange(start, start + self._capacity, dtype=np.int32)

    def _same(self, name: str, value: np.ndarray) -> Array:
        return self._kept(name, value, lambda x: place(x, replicate_sharding(self._mesh)))

    def _kept(self, name: str, value: np.ndarray, put: Callable[[np.ndarray], Array]) -> Array:
        content = value.tobytes()
        if name not in self._placed or self._placed[name][0] != content:
            self._placed[name] = content, put(value)
        return self._placed[name][1]
