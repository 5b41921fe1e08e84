"""Runs independent agents of several seeds in one program, whose arrays have a leading axis of seeds.

Every device owns its shards of every seed, so that what holds for a run's shards holds for each seed's. With ``exact``,
a call runs the seeds one after another, in a loop whose body is compiled once: each has the bytes of its own single
run, and nothing is started, read or compiled between seeds. With ``fast`` they are one batch (``vmap``), which agrees
with single runs up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, TypeVarTuple

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.distributed.mesh import (
    REPLICATED,
    SHARDED,
    named_sharding,
    over_mesh,
    replicate_sharding,
    stacked,
)
from lockstep.jax_engine.distributed.placement import fetch, place, waited
from lockstep.jax_engine.program.calls import CallClock, CallInputs, Pending, iterations_per_call, no_matter
from lockstep.jax_engine.program.device_program import DeviceProgram
from lockstep.jax_engine.program.iterations import Inputs, Iteration, Outputs, finished
from lockstep.jax_engine.program.program import Program, purpose_words
from lockstep.jax_engine.program.runner import shard_arrays
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.state import TrainState, place_state, state_specs

Tree = TypeVar("Tree")
Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")

CallOfSeeds = Callable[[Array, TrainState, Inputs, Array, Array, Array, Array], tuple[TrainState, Outputs]]
"""A compiled call of all seeds: takes their keys' words, what :data:`.device_program.Call` takes, their number."""


class SeedsRunner:
    """Holds the training states of all seeds on the mesh, leaves ``[seeds, …]``, and the program that changes them.

    ``program`` is that of one seed; ``states`` are host arrays without environments, one state per seed.
    """

    def __init__(
        self, program: Program, seeds: Sequence[int], states: Sequence[TrainState], local_devices: int
    ) -> None:
        self.program, self.config, self.seeds = program, program.config, list(seeds)
        self.capacity = iterations_per_call(self.config)
        self._inputs, self._clock = CallInputs(self.config, program.mesh, local_devices), CallClock()
        mesh, parameters = program.mesh, program.layout.specs
        self._without = state_specs(states[0], parameters)
        self._specs = state_specs(states[0]._replace(envs=DeviceProgram(program).carry_shapes()), parameters)
        whole = replicate_sharding(mesh)
        self._owned = place(program.rows.owned, named_sharding(mesh, SHARDED))
        self._count = place(np.int32(len(seeds)), whole)
        self._words = place(np.stack([purpose_words(seed) for seed in seeds]), whole)
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        self.state = place_state(together, _stacked(self._without), mesh)
        self._call = waited(self._compile_call())

    def _of_seed(self, words: Array) -> DeviceProgram:
        """Makes the program of one seed from the words of its keys."""
        return DeviceProgram(replace(self.program, key_words=words))

    def _compile_call(self) -> CallOfSeeds:

        def call(
            words: Array, state: TrainState, inputs: Inputs, stop: Array, owned: Array, count: Array, seeds: Array
        ) -> tuple[TrainState, Outputs]:
            def one(words: Array, state: TrainState) -> tuple[TrainState, Outputs]:
                return self._of_seed(words).call(state, inputs, stop, owned, count)

            return self._for_each(one, seeds, words, state)

        specs, outputs = _stacked(self._specs), _stacked(DeviceProgram(self.program).call_specs)
        given = (REPLICATED, specs, REPLICATED, SHARDED, SHARDED, REPLICATED, REPLICATED)
        return self.program.compiled(call, given, (specs, outputs), donated=1)

    def begin(self) -> None:
        """See :meth:`.Runner.begin`."""

        def initial(words: Array, state: TrainState, owned: Array, seeds: Array) -> TrainState:
            def one(words: Array, state: TrainState) -> TrainState:
                return self._of_seed(words).initial(state, owned)

            return self._for_each(one, seeds, words, state)

        given = (REPLICATED, _stacked(self._without), SHARDED, REPLICATED)
        program = self.program.compiled(initial, given, _stacked(self._specs))
        self.state = program(self._words, self.state, self._owned, self._count)

    def _for_each(self, function: Callable[[*Trees], Result], count: Array, *trees: *Trees) -> Result:
        """Calls a function of one seed for each of ``[seeds, …]``: in a loop (exact), or for all at once (fast)."""
        if self.program.blocks.exact:
            return each_shard(function, len(self.seeds), count, *trees)
        return jax.vmap(function)(*trees)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """Starts ``count`` iterations of every seed; see :meth:`.Runner.dispatch`."""
        inputs, stops, many = self._inputs(first, count, stop)
        before()
        self._clock.begins()
        self.state, outputs = self._call(self._words, self.state, inputs, stops, self._owned, many, self._count)
        self._clock.follow(outputs.metrics)
        return Pending(first, count, outputs)

    def fetch(self, pending: Pending) -> list[list[Iteration]]:
        """Waits for a call and reads its outputs: a list of iterations, each with every seed's result in order."""
        metrics = {name: fetch(x).tolist() for name, x in pending.outputs.metrics.items()}
        returns, marks = (fetch(x)[:, : pending.count] for x in pending.outputs[1:])
        episodes = [finished(*both) for both in zip(returns, marks, strict=True)]
        shares = self._clock.shares(pending.count)

        def one(i: int, k: int) -> Iteration:
            told = {name: x[k][i] for name, x in metrics.items()}
            return Iteration(pending.first + i, told, episodes[k][i], *shares[i])

        return [[one(i, k) for k in range(len(self.seeds))] for i in range(pending.count)]

    def state_of(self, number: int) -> TrainState:
        """Returns the state of one seed, by its place among them, laid out as in a run of its own."""
        return self._part(self.state, jnp.int32(number))

    @cached_property
    def _part(self) -> Callable[[TrainState, Array], TrainState]:
        def part(state: TrainState, number: Array) -> TrainState:
            with jax.enable_x64(True):
                return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), state)

        return jax.jit(over_mesh(part, self.program.mesh, (_stacked(self._specs), REPLICATED), self._specs))


class SeedOfRunner:
    """Makes one seed of a :class:`SeedsRunner` that has begun, by its place, a :class:`.Runner`."""

    def __init__(self, runner: SeedsRunner, number: int) -> None:
        self._runner, self._number, self.capacity = runner, number, runner.capacity

    @property
    def state(self) -> TrainState:
        """See :attr:`.Runner.state`."""
        return self._runner.state_of(self._number)

    def begin(self) -> None:
        """Does nothing: all seeds begin together."""

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """Starts iterations of all seeds; see :meth:`SeedsRunner.dispatch`."""
        return self._runner.dispatch(first, count, stop, before)

    def fetch(self, pending: Pending) -> list[Iteration]:
        """See :meth:`.Runner.fetch`; results of the other seeds are dropped."""
        return [iterations[self._number] for iterations in self._runner.fetch(pending)]

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """See :meth:`.Runner.env_arrays`."""
        return shard_arrays(self.state, self._runner.program.rows)

    def restore(self, state: TrainState, shards: Mapping[int, dict[str, np.ndarray]]) -> list[int]:
        """Raises a one-line ``ValueError``, because a run of several seeds can't be resumed."""
        raise ValueError("num_seeds: a run of several seeds can't go on from one checkpoint")

    def close(self) -> None:
        """Does nothing: environments are part of the state."""


def _stacked(specs: Tree) -> Tree:
    return jax.tree.map(stacked, specs)
