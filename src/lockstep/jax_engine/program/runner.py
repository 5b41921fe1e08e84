"""Runs iterations whose environments are inside the compiled program: several per call, one call ahead of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from lockstep.core.life import Part, life
from lockstep.jax_engine.distributed.mesh import SHARDED, named_sharding
from lockstep.jax_engine.distributed.placement import fetch, gathered, place, waited
from lockstep.jax_engine.program.calls import CallClock, CallInputs, Pending, iterations_per_call, no_matter
from lockstep.jax_engine.program.device_program import DeviceProgram
from lockstep.jax_engine.program.iterations import Iteration, finished
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.shards.keys import is_key
from lockstep.jax_engine.shards.rows import ShardRows
from lockstep.jax_engine.shards.saved import check_fit, from_saved, named_leaves, to_saved
from lockstep.jax_engine.state import EnvCarry, TrainState, place_state, state_specs


class Runner(Protocol):
    """The interface of what holds a session's state and environments, and starts its iterations.

    Attributes:
        capacity: the most iterations of one call.
    """

    capacity: int

    @property
    def state(self) -> TrainState:
        """The training state, on the mesh."""
        ...

    def begin(self) -> None:
        """Begins first episodes, and fills normalisers with first statistics."""
        ...

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Any:
        """Starts ``count`` iterations, at most ``capacity``, after ``first``; returns while they are under way.

        ``stop`` is this process's stop code. ``before`` is called just before the call takes the state over. What is
        returned is for :meth:`fetch`.
        """
        ...

    def fetch(self, pending: Any) -> list[Iteration]:
        """Waits for a call and reads its outputs."""
        ...

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """Copies the environments' arrays for a checkpoint, by shard; with several processes a collective."""
        ...

    def restore(self, state: TrainState, shards: Mapping[int, dict[str, np.ndarray]]) -> list[int]:
        """Restores a checkpoint; returns the environments of all processes that couldn't be restored exactly."""
        ...

    def close(self) -> None:
        """Waits until nothing is under way, and closes environments."""
        ...


class DeviceRunner:
    """Holds the training state on the mesh, its environments, and the program that changes both.

    ``state`` is passed as host arrays without environments. ``env_shapes`` are the shapes of the whole run's
    environments.
    """

    before: int = 0
    """Iterations of earlier runs that this one continues; their random numbers aren't drawn again."""

    def __init__(self, program: Program, state: TrainState, local_devices: int) -> None:
        self.program, self.config = program, program.config
        self.capacity = iterations_per_call(self.config)
        self._inputs = CallInputs(self.config, program.mesh, local_devices)
        without = state_specs(state, program.layout.specs)
        self.owned = place(program.rows.owned, named_sharding(program.mesh, SHARDED))
        self._program = compiled = DeviceProgram(program)
        carry = compiled.carry_shapes()
        self.specs = state_specs(state._replace(envs=carry), program.layout.specs)
        self.env_shapes: EnvCarry = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.config.shards, *x.shape[1:]), x.dtype), carry
        )
        self.state = place_state(state, without, program.mesh)
        self._initial = program.compiled(compiled.initial, (without, SHARDED), self.specs)
        self._call = waited(compiled.compile_call(self.specs))
        self._clock = CallClock()

    def begin(self) -> None:
        """See :meth:`.Runner.begin`."""
        self._clock = CallClock()  # an interrupted training may have left calls in the old one
        self.state = self._initial(self.state, self.owned)

    def begin_with(self, state: TrainState) -> None:
        """Begins from a state of host arrays that includes the environments, by shard."""
        assert state.envs is not None
        self._clock = CallClock()
        self.state = place_state(state._replace(envs=self._in_rows(state.envs)), self.specs, self.program.mesh)

    def replace_environments(self, envs: EnvCarry) -> None:
        """Replaces the environments by those on the host, ``[num_shards, environments of each, …]``."""
        mesh, envs = self.program.mesh, self._in_rows(envs)
        placed = jax.tree.map(lambda x, spec: place(x, named_sharding(mesh, spec)), envs, self.specs.envs)
        self.state = self.state._replace(envs=placed)

    def _in_rows(self, envs: EnvCarry) -> EnvCarry:
        """Lays out environments on the host, by shard, as the rows of all devices."""
        rows = self.program.rows
        return envs if rows.tree.even else jax.tree.map(lambda x: x[rows.shard_of_row], envs)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """See :meth:`.Runner.dispatch`."""
        inputs, stops, many = self._inputs(first, count, stop, self.before)
        before()
        self._clock.begins()
        self.state, outputs, following = self._call(self.state, inputs, stops, self.owned, many)
        self._clock.follow(outputs.metrics)
        self._inputs.follows(first + count, following, self.before)
        return Pending(first, count, outputs)

    def fetch(self, pending: Pending) -> list[Iteration]:
        """See :meth:`.Runner.fetch`."""
        life.begin(Part.PROGRAM)
        words = fetch(pending.outputs.metrics)  # pyright: ignore[reportArgumentType]
        metrics = {name: x.tolist() for name, x in self._program.metrics.on_host(words).items()}
        episodes = finished(*(fetch(x)[: pending.count] for x in pending.outputs[1:]))
        shares = self._clock.shares(pending.count)
        return [
            Iteration(pending.first + i, {name: x[i] for name, x in metrics.items()}, told, *share)
            for i, (told, share) in enumerate(zip(episodes, shares, strict=True))
        ]

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """See :meth:`.Runner.env_arrays`."""
        return shard_arrays(self.state, self.program.rows)

    def restore(self, state: TrainState, shards: Mapping[int, dict[str, np.ndarray]]) -> list[int]:
        """See :meth:`.Runner.restore`; all environments are restored exactly."""
        mesh = self.program.mesh
        self.state = place_state(state, state_specs(state, self.program.layout.specs), mesh)
        if self.config.algorithm == "grpo":  # every iteration begins new episodes
            self.state = self.state._replace(envs=self._initial(self.state, self.owned).envs)
            return []
        template = jax.eval_shape(self._initial, self.state, self.owned).envs
        sharding = named_sharding(mesh, SHARDED)
        named, leaves = _leaves(template), []
        mine = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in named}
        for shard in range(self.config.shards):
            check_fit(mine, shards[shard])
        for name, leaf in named:
            whole = self.program.rows.laid_out(np.stack([shards[n][name] for n in range(self.config.shards)]))
            if is_key(leaf):
                leaves.append(jax.random.wrap_key_data(place(whole, sharding), impl=jax.random.key_impl(leaf)))
            else:
                leaves.append(place(from_saved(whole, leaf.dtype), sharding))
        self.state = self.state._replace(envs=jax.tree.unflatten(jax.tree.structure(template), leaves))
        return []

    def close(self) -> None:
        """See :meth:`.Runner.close`."""
        with contextlib.suppress(Exception):  # the error has been raised already
            jax.block_until_ready(self.state)


def shard_arrays(state: TrainState, rows: ShardRows) -> dict[int, dict[str, np.ndarray]]:
    """Copies the environments' arrays to the host, by shard and name; with several processes a collective."""
    named = {name: to_saved(gathered(x)) for name, x in _leaves(state.envs)}
    places = enumerate(rows.of_shards.tolist())
    return {shard: {name: array[row].copy() for name, array in named.items()} for shard, row in places}


CHECKPOINT_NAMES = {"recurrent_state": "memory"}
"""Names of arrays in a checkpoint that differ from the fields of :class:`lockstep.jax_engine.state.EnvCarry`."""


def _leaves(envs: EnvCarry | None) -> list[tuple[str, Array]]:
    """Names leaves by their path; random keys become their words."""
    out = []
    for path, leaf in named_leaves(envs):
        name = CHECKPOINT_NAMES.get(path, path)
        typed = isinstance(leaf, jax.Array) and is_key(leaf)
        out.append((name, jax.random.key_data(leaf) if typed else leaf))
    return out
