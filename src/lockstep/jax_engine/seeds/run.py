"""Independent agents of several seeds in one program, whose arrays have a leading axis of seeds.

Every device owns its shards of every seed, so that whatever holds for a run's shards holds for each seed's. In
``exact`` a call runs the seeds one after another, in a loop whose body is compiled once: the bytes of each are those of
its own single run, and nothing is started, read or compiled again between seeds. In ``fast`` they are one batch
(``vmap``), which agrees with single runs up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.distributed.mesh import (
    REPLICATED,
    SHARDED,
    TIME_SHARDED,
    over_mesh,
    replicate_sharding,
    stacked,
)
from lockstep.jax_engine.distributed.placement import fetch, place
from lockstep.jax_engine.program.calls import CallInputs, Pending, iterations_per_call, no_matter
from lockstep.jax_engine.program.iterations import Inputs, Iteration, Outputs, finished
from lockstep.jax_engine.program.program import Program, purpose_words
from lockstep.jax_engine.program.run import parameter_specs, shard_arrays
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.state import TrainState, place_state, state_specs


class SeedsRun:
    """The training states of all seeds on the mesh, leaves ``[seeds, …]``, and the program that changes them.

    Args:
        program: of one seed.
        seeds: of the agents.
        states: of each seed, host arrays, without environments.
        local_devices: of this process.
    """

    def __init__(
        self, program: Program, seeds: Sequence[int], states: Sequence[TrainState], local_devices: int
    ) -> None:
        self.program, self.config, self.seeds = program, program.config, list(seeds)
        self.capacity = iterations_per_call(self.config)
        self._inputs, self._mark = CallInputs(self.config, program.mesh, local_devices), time.perf_counter()
        mesh, parameters = program.mesh, parameter_specs(program)
        self._without = state_specs(states[0], parameters)
        self._specs = state_specs(states[0]._replace(envs=program.carry_shapes()), parameters)
        whole = replicate_sharding(mesh)
        self._owned = place(np.int32(program.blocks.shards), whole)
        self._count = place(np.int32(len(seeds)), whole)
        self._words = place(np.stack([purpose_words(seed) for seed in seeds]), whole)
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        self.state = place_state(together, _stacked(self._without), mesh)
        self._call = self._compile_call()

    def _compile_call(self) -> Any:
        program = self.program

        def call(
            words: Array, state: TrainState, inputs: Inputs, stop: Array, owned: Array, count: Array, seeds: Array
        ) -> Any:
            def one(words: Array, state: TrainState) -> Any:
                return replace(program, key_words=words).call(state, inputs, stop, owned, count)

            return self._for_each(one, seeds, words, state)

        specs, episodes = _stacked(self._specs), stacked(TIME_SHARDED)
        outputs: Any = Outputs(REPLICATED, episodes, episodes)  # type: ignore[arg-type]
        given = (REPLICATED, specs, REPLICATED, SHARDED, REPLICATED, REPLICATED, REPLICATED)
        return jax.jit(program.mapped(call, given, (specs, outputs)), donate_argnums=1)

    def begin(self) -> None:
        """First episodes, and first statistics where something is normalised."""

        def initial(words: Array, state: TrainState, owned: Array, seeds: Array) -> TrainState:
            def one(words: Array, state: TrainState) -> TrainState:
                return replace(self.program, key_words=words).initial(state, owned)

            return self._for_each(one, seeds, words, state)

        given = (REPLICATED, _stacked(self._without), REPLICATED, REPLICATED)
        mapped = self.program.mapped(initial, given, _stacked(self._specs))
        self.state = jax.jit(mapped)(self._words, self.state, self._owned, self._count)

    def _for_each(self, function: Any, count: Array, *trees: Any) -> Any:
        """Call a function of one seed for each of ``[seeds, …]``: in a loop (exact), or for all at once (fast)."""
        if self.program.blocks.exact:
            return each_shard(function, len(self.seeds), count, *trees)
        return jax.vmap(function)(*trees)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """Start ``count`` iterations of every seed; see :meth:`~lockstep.jax_engine.program.run.DeviceRun.dispatch`."""
        inputs, stops, many = self._inputs(first, count, stop)
        before()
        begun = time.perf_counter()
        self.state, outputs = self._call(self._words, self.state, inputs, stops, self._owned, many, self._count)
        return Pending(first, count, outputs, begun)

    def fetch(self, pending: Pending) -> list[list[Iteration]]:
        """Wait for a call and read what it tells: for each iteration what each seed's told, in order."""
        metrics = {name: fetch(x).tolist() for name, x in pending.outputs.metrics.items()}
        returns, marks = (fetch(x)[:, : pending.count] for x in pending.outputs[1:])
        episodes = [finished(*both) for both in zip(returns, marks, strict=True)]
        now = time.perf_counter()
        seconds = (now - max(self._mark, pending.begun)) / pending.count
        self._mark = now

        def one(i: int, k: int) -> Iteration:
            return Iteration(pending.first + i, {name: x[k][i] for name, x in metrics.items()}, episodes[k][i], seconds)

        return [[one(i, k) for k in range(len(self.seeds))] for i in range(pending.count)]

    def state_of(self, number: int) -> TrainState:
        """The state of one seed, by its place among them, laid out as that of its own run would be."""
        return self._part(self.state, jnp.int32(number))

    @cached_property
    def _part(self) -> Any:
        def part(state: TrainState, number: Array) -> TrainState:
            with jax.enable_x64(True):
                return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), state)

        return jax.jit(over_mesh(part, self.program.mesh, (_stacked(self._specs), REPLICATED), self._specs))


class OneOfSeeds:
    """One seed of a :class:`SeedsRun` in the place of a run of its own, as far as a session asks for one.

    Args:
        run: of all seeds.
        number: its place among them.
    """

    restarted: tuple[int, ...] = ()

    def __init__(self, run: SeedsRun, number: int) -> None:
        self._run, self._number = run, number

    @property
    def capacity(self) -> int:
        """Iterations of one call."""
        return self._run.capacity

    @property
    def state(self) -> TrainState:
        """The training state, on the mesh."""
        return self._run.state_of(self._number)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """Start iterations, of all seeds: see :meth:`SeedsRun.dispatch`."""
        return self._run.dispatch(first, count, stop, before)

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """What a checkpoint holds of environments, by shard."""
        return shard_arrays(self.state, self._run.config.shards)

    def close(self) -> None:
        """Nothing to let go."""


def _stacked(specs: TrainState) -> TrainState:
    return jax.tree.map(stacked, specs)
