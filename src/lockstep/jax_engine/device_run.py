"""Iterations whose environments are in the compiled program: calls of several at once, one call ahead of the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from lockstep.config import Config
from lockstep.episodes import WINDOW
from lockstep.jax_engine.iterations import Finished, Inputs, Iteration, Outputs, learning_rates, numbers_of
from lockstep.jax_engine.mesh import REPLICATED, SHARDED, cut_along, named_sharding, replicate_sharding
from lockstep.jax_engine.placement import fetch, gathered, place, shard_rows
from lockstep.jax_engine.program import Program
from lockstep.jax_engine.state import TrainState, place_state, state_specs

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
        self._local_devices = local_devices
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
        mesh = self.program.mesh
        rates = np.zeros(self.capacity, np.float32)
        rates[:count] = learning_rates(self.config, first, count)
        numbers = np.arange(self.before + first, self.before + first + self.capacity, dtype=np.int32)
        inputs = Inputs(place(numbers, replicate_sharding(mesh)), place(rates, replicate_sharding(mesh)))
        stops = shard_rows(np.full(self._local_devices, stop, np.int32), mesh)
        many = place(np.int32(count), replicate_sharding(mesh))
        before()
        begun = time.perf_counter()
        self.state, outputs = self._call(self.state, inputs, stops, self.owned, many)
        return Pending(first, count, outputs, begun)

    def fetch(self, pending: Pending) -> list[Iteration]:
        """Wait for a call and read what it tells."""
        metrics = {name: fetch(x) for name, x in pending.outputs.metrics.items()}
        returns, marks = fetch(pending.outputs.returns), fetch(pending.outputs.marks)
        now = time.perf_counter()
        seconds = (now - max(self._mark, pending.begun)) / pending.count
        self._mark = now
        return [
            Iteration(
                pending.first + i,
                {name: x[i] for name, x in metrics.items()},
                finished(returns[i], marks[i]),
                seconds,
            )
            for i in range(pending.count)
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


def finished(returns: np.ndarray, marks: np.ndarray) -> Finished:
    """Episodes that ended in an iteration ``[num_shards, T, rows]``: their number, and the newest of them in order."""
    steps = marks.shape[1]
    ordered = marks.transpose(1, 0, 2).reshape(steps, -1)
    ends = np.flatnonzero(ordered)
    newest = ends[-WINDOW:]
    chosen = ordered.reshape(-1)[newest]
    values = returns.transpose(1, 0, 2).reshape(-1)[newest] if math.prod(returns.shape) else returns.reshape(-1)
    episodes = zip(values.tolist(), (chosen // 4).tolist(), (chosen % 4 - 2).tolist(), strict=True)
    return Finished(list(episodes), len(ends))


__all__ = ["DeviceRun", "Pending", "finished", "iterations_per_call", "numbers_of", "parameter_specs"]
