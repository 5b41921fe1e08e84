"""Calls of a compiled program of several iterations: how many each takes, what it is told, and one under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.jax_engine.distributed.mesh import Mesh, replicate_sharding
from lockstep.jax_engine.distributed.placement import place, shard_rows
from lockstep.jax_engine.program.iterations import Inputs, Outputs, learning_rates

STEPS_PER_CALL = 1 << 15
MOST_PER_CALL = 16


def iterations_per_call(config: Config) -> int:
    """Iterations of one call of the program: several where they are short, so that calling costs little."""
    return max(1, min(MOST_PER_CALL, STEPS_PER_CALL // config.steps_per_iteration, config.num_iterations))


def no_matter() -> None:
    """Nothing has to be done before a state is taken over."""


class Pending:
    """A call under way: what it will tell, and when it began."""

    def __init__(self, first: int, count: int, outputs: Outputs, begun: float) -> None:
        self.first, self.count, self.outputs, self.begun = first, count, outputs, begun


class CallInputs:
    """What calls of a program are told, on its mesh: which iterations, at what learning rates, and whether to stop.

    Placing a small array on several devices takes about as long as logging an iteration: what a call is told just as
    the one before was isn't placed again.

    Args:
        config: the run's.
        mesh: the program's.
        local_devices: of this process.
    """

    def __init__(self, config: Config, mesh: Mesh, local_devices: int) -> None:
        self._config, self._mesh, self._local_devices = config, mesh, local_devices
        self._capacity = iterations_per_call(config)
        self._placed: dict[str, tuple[np.ndarray, Array]] = {}

    def __call__(self, first: int, count: int, stop: int, before: int = 0) -> tuple[Inputs, Array, Array]:
        """Inputs ``[capacity]`` of ``count`` iterations, a stop code ``[devices]``, and ``count`` ``[]``.

        Args:
            first: iterations done before.
            count: see above.
            stop: this process's stop code.
            before: iterations of earlier runs, whose random numbers aren't drawn again.
        """
        capacity, start = self._capacity, before + first
        numbers = np.arange(start, start + capacity, dtype=np.int32)
        rates = learning_rates(self._config, first, capacity)
        inputs = Inputs(self._same("iteration", numbers), self._same("learning_rate", rates))
        stops = self._kept("stop", np.full(self._local_devices, stop, np.int32), lambda x: shard_rows(x, self._mesh))
        return inputs, stops, self._same("count", np.asarray(count, np.int32))

    def _same(self, name: str, value: np.ndarray) -> Array:
        return self._kept(name, value, lambda x: place(x, replicate_sharding(self._mesh)))

    def _kept(self, name: str, value: np.ndarray, put: Callable[[np.ndarray], Any]) -> Array:
        if name not in self._placed or not np.array_equal(self._placed[name][0], value):
            self._placed[name] = value, put(value)
        return self._placed[name][1]
