"""Calls a compiled program of several iterations: how many each takes, what it is told, and one under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.jax_engine.distributed.mesh import Mesh, replicate_sharding
from lockstep.jax_engine.distributed.placement import place, shard_rows
from lockstep.jax_engine.program.iterations import Inputs, Outputs, coefficients_of, learning_rates

STEPS_PER_CALL = 1 << 15
MOST_PER_CALL = 16


def iterations_per_call(config: Config) -> int:
    """Chooses how many iterations a call takes: several where they are short, so that calling costs little."""
    return max(1, min(MOST_PER_CALL, STEPS_PER_CALL // config.steps_per_iteration, config.num_iterations))


def no_matter() -> None:
    """Does nothing before a state is taken over."""


@dataclass(frozen=True)
class Pending:
    """A call of ``count`` iterations under way, begun after ``first`` of them, at a time by the performance counter."""

    first: int
    count: int
    outputs: Outputs
    begun: float


class CallInputs:
    """Places what calls of a program are told on its mesh: which iterations, their rates, whether to stop.

    Placing a small array on several devices takes about as long as logging an iteration: what a call is told just as
    the one before was isn't placed again.
    """

    def __init__(self, config: Config, mesh: Mesh, local_devices: int) -> None:
        self._config, self._mesh, self._local_devices = config, mesh, local_devices
        self._capacity = iterations_per_call(config)
        self._placed: dict[str, tuple[bytes, Array]] = {}

    def __call__(self, first: int, count: int, stop: int, before: int = 0) -> tuple[Inputs, Array, Array]:
        """Places inputs ``[capacity]`` of ``count`` iterations, a stop code ``[devices]``, and ``count`` ``[]``.

        ``first`` iterations are done before; ``before`` are those of earlier runs, whose random numbers aren't drawn
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
        """Takes note of the numbers of iterations after ``first``, as a call has left them on the mesh."""
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
