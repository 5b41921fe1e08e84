"""Calls a compiled program of several iterations: how many each takes, what it is told, and one under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.jax_engine.distributed.mesh import Mesh, replicate_sharding
from lockstep.jax_engine.distributed.placement import place, shard_rows
from lockstep.jax_engine.program.iterations import Inputs, Iteration, Outputs, learning_rates
from lockstep.jax_engine.state import TrainState

STEPS_PER_CALL = 1 << 15
MOST_PER_CALL = 16


def iterations_per_call(config: Config) -> int:
    """Chooses how many iterations a call takes: several where they are short, so that calling costs little."""
    return max(1, min(MOST_PER_CALL, STEPS_PER_CALL // config.steps_per_iteration, config.num_iterations))


def no_matter() -> None:
    """Does nothing before a state is taken over."""


@dataclass(frozen=True)
class Pending:
    """A call under way.

    Attributes:
        first: iterations done before it.
        count: iterations that it takes.
        outputs: what it will tell.
        begun: when it began, by the performance counter.
    """

    first: int
    count: int
    outputs: Outputs
    begun: float


UnderWay = TypeVar("UnderWay")


class Run(Protocol[UnderWay]):
    """The training state on the mesh, the environments, and the programs that change them; chosen by the session.

    Environments are in the program, on the host, or those of one of several seeds.

    Attributes:
        capacity: iterations of one call, at most.
    """

    capacity: int

    @property
    def state(self) -> TrainState:
        """The training state, on the mesh."""
        ...

    def begin(self) -> None:
        """Begins first episodes, and fills normalisers with first statistics."""
        ...

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> UnderWay:
        """Starts ``count`` iterations and returns while they are under way.

        Args:
            first: iterations done before.
            count: how many, at most ``capacity``.
            stop: this process's stop code.
            before: called as late as can be before the state is taken over, when all else has been made ready.
        """
        ...

    def fetch(self, pending: UnderWay) -> list[Iteration]:
        """Waits for a call and reads what it tells."""
        ...

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """Copies what a checkpoint holds of environments, by shard; with several processes a collective."""
        ...

    def restore(self, state: TrainState, shards: Mapping[int, dict[str, np.ndarray]], iteration: int) -> list[int]:
        """Goes on from a checkpoint's state and environments; returns those that couldn't be restored exactly."""
        ...

    def close(self) -> None:
        """Waits until nothing is under way, and lets the environments go."""
        ...


class CallInputs:
    """Places what calls of a program are told on its mesh: which iterations, their learning rates, whether to stop.

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
        """Places inputs ``[capacity]`` of ``count`` iterations, a stop code ``[devices]``, and ``count`` ``[]``.

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

    def _kept(self, name: str, value: np.ndarray, put: Callable[[np.ndarray], Array]) -> Array:
        if name not in self._placed or not np.array_equal(self._placed[name][0], value):
            self._placed[name] = value, put(value)
        return self._placed[name][1]
