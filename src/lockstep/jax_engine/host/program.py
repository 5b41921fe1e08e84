"""Compiles the update as a program of its own, for rollouts that were collected on the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array
from jax.typing import ArrayLike

from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED
from lockstep.jax_engine.distributed.reductions import gather_shards
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.program.program import Carried, Program
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.normalizers import frozen, normalized
from lockstep.jax_engine.state import TrainState
from lockstep.jax_engine.statistics import NormalizerMoments, merge_normalizers, normalizer_moments

Learned = tuple[TrainState, dict[str, Array], Carried]
"""The state after an update, metrics, and what environments carry on, by shard."""


Learn = Callable[[TrainState, Rollout, ArrayLike, Inputs, ArrayLike, ArrayLike], Learned]
"""A compiled :meth:`HostProgram.learn_from_host`."""


class HostProgram:
    """Compiles what is left to the devices where environments are stepped on the host.

    Args:
        program: what is compiled, and for what.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def merged_rollout(self, state: TrainState, rollout: Rollout) -> Rollout:
        """Merges a rollout by shard ``[shards, T, rows, …]`` into blocks, and normalises its observations."""
        blocks, clip = self.program.blocks, self.program.config.normalize.clip_observations
        recurrent_state = blocks.merge(rollout.recurrent_state)
        merged = blocks.merge(rollout._replace(recurrent_state=None), axis=2)._replace(recurrent_state=recurrent_state)
        scale, layout = frozen(state.observation_normalizer), self.program.net.observation
        seen, final = (normalized(layout, x, scale, clip) for x in (merged.observations, merged.final))
        return merged._replace(observations=seen, final=final)

    def learn_from_host(
        self, state: TrainState, rollout: Rollout, discounted: Array, inputs: Inputs, stop: Array, owned: Array
    ) -> Learned:
        """Learns from a rollout by shard ``[shards, T, rows, …]``; see :meth:`.program.Program.learn`."""
        blocks, merged = self.program.blocks, self.merged_rollout(state, rollout)
        state, metrics, carried = self.program.learn(state, merged, blocks.merge(discounted), inputs, stop, owned)
        return state, metrics, blocks.split(carried)

    def compile_learn(self, specs: TrainState) -> Learn:
        """Compiles :meth:`learn_from_host` over the mesh; the state's memory is reused."""
        given = (specs, SHARDED, SHARDED, REPLICATED, SHARDED, REPLICATED)
        mapped = self.program.mapped(self.learn_from_host, given, (specs, REPLICATED, SHARDED))
        return jax.jit(mapped, donate_argnums=0)

    def compile_first(self, specs: TrainState) -> Callable[[TrainState, Rollout, Array, Array], TrainState]:
        """Compiles first statistics of normalisers, of a random policy's rollout that was collected on the host."""

        def first(state: TrainState, rollout: Rollout, discounted: Array, owned: Array) -> TrainState:
            def one(rollout: Rollout, discounted: Array) -> NormalizerMoments:
                return normalizer_moments(self.program.config, self.program.net, rollout, discounted)[0]

            parts = each_shard(one, self.program.blocks.shards, owned, rollout, discounted)
            return merge_normalizers(state, gather_shards(parts))

        return jax.jit(self.program.mapped(first, (specs, SHARDED, SHARDED, REPLICATED), specs))
