"""Iterations whose environments are in the compiled program: calls of several at once, one call ahead of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, cut_along, named_sharding, replicate_sharding
from lockstep.jax_engine.distributed.placement import fetch, gathered, place
from lockstep.jax_engine.program.calls import CallInputs, Pending, iterations_per_call, no_matter
from lockstep.jax_engine.program.iterations import Iteration, finished
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.state import TrainState, place_state, state_specs


class DeviceRun:
    """The training state on the mesh, and the program that changes it.

    Args:
        program: what is compiled.
        state: of host arrays, without environments.
        local_devices: of this process.
    """

    restarted: tuple[int, ...] = ()
    before: int = 0
    """Iterations of earlier runs that this one goes on from: their random numbers aren't drawn again."""

    def __init__(self, program: Program, state: TrainState, local_devices: int) -> None:
        self.program, self.config = program, program.config
        self.capacity = iterations_per_call(self.config)
        self._inputs = CallInputs(self.config, program.mesh, local_devices)
        parameters = parameter_specs(program)
        without = state_specs(state, parameters)
        blocks = program.blocks
        self.owned = place(np.int32(blocks.shards), replicate_sharding(program.mesh))
        self.specs = state_specs(state._replace(envs=program.carry_shapes()), parameters)
        self.state = place_state(state, without, program.mesh)
        self._initial = program.compile_initial(self.specs, without)
        self._call = program.compile_call(self.specs)
        self._mark = time.perf_counter()

    def begin(self) -> None:
        """First episodes, and first statistics where something is normalised."""
        self.state = self._initial(self.state, self.owned)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> Pending:
        """Start ``count`` iterations, ``first`` having been done before; returns while they are under way.

        Args:
            first: see above.
            count: see above.
            stop: this process's stop code.
            before: called as late as can be before the state is taken over, when all else has been made ready.
        """
        inputs, stops, many = self._inputs(first, count, stop, self.before)
        before()
        begun = time.perf_counter()
        self.state, outputs = self._call(self.state, inputs, stops, self.owned, many)
        return Pending(first, count, outputs, begun)

    def fetch(self, pending: Pending) -> list[Iteration]:
        """Wait for a call and read what it tells."""
        metrics = {name: fetch(x).tolist() for name, x in pending.outputs.metrics.items()}
        episodes = finished(*(fetch(x)[: pending.count] for x in pending.outputs[1:]))
        now = time.perf_counter()
        seconds = (now - max(self._mark, pending.begun)) / pending.count
        self._mark = now
        return [
            Iteration(pending.first + i, {name: x[i] for name, x in metrics.items()}, ended, seconds)
            for i, ended in enumerate(episodes)
        ]

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """What a checkpoint holds of environments, by shard; with several processes a collective."""
        return shard_arrays(self.state, self.config.shards)

    def restore(self, state: TrainState, shards: Mapping[int, Mapping[str, np.ndarray]], iteration: int) -> list[int]:
        """Go on from a checkpoint's state and environments; nothing has to be restarted."""
        mesh = self.program.mesh
        without = state_specs(state, parameter_specs(self.program))
        self.state = place_state(state, without, mesh)
        if self.config.algorithm == "grpo":  # every iteration begins with episodes of its own
            self.state = self.state._replace(envs=self._initial(self.state, self.owned).envs)
            return []
        template = jax.eval_shape(self._initial, self.state, self.owned).envs
        sharding = named_sharding(mesh, SHARDED)
        leaves = []
        for name, leaf in _leaves(template):
            whole = np.stack([shards[shard][name] for shard in range(self.config.shards)])
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaves.append(jax.random.wrap_key_data(place(whole, sharding), impl=jax.random.key_impl(leaf)))
            else:
                leaves.append(place(whole.reshape(leaf.shape), sharding))
        self.state = self.state._replace(envs=jax.tree.unflatten(jax.tree.structure(template), leaves))
        return []

    def wait(self) -> None:
        """Wait until nothing is under way."""
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Nothing to let go."""


def shard_arrays(state: TrainState, shards: int) -> dict[int, dict[str, np.ndarray]]:
    """What environments carry, by shard and name, on the host; with several processes a collective."""
    named = {name: gathered(x) for name, x in _leaves(state.envs)}
    return {shard: {name: array[shard].copy() for name, array in named.items()} for shard in range(shards)}


def parameter_specs(program: Program) -> Any:
    """How parameters lie on the mesh."""
    axes = program.layout.axes
    if not axes:
        return REPLICATED
    return {name: REPLICATED if axis is None else cut_along(axis) for name, axis in axes.items()}


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves by path; keys of random numbers as their words."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    out = []
    for path, leaf in flat:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        out.append((name, jax.random.key_data(leaf) if typed else leaf))
    return out
