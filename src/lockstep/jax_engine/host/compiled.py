"""Compiles the update as a separate program, for rollouts that were collected on the host."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array
from jax import numpy as jnp
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
"""The state after an update, metrics, and the state that environments carry on, by shard."""


def _merged_rollout(program: Program, state: TrainState, rollout: Rollout) -> Rollout:
    """Merges a rollout by shard ``[shards, T, rows, …]`` into blocks, and normalises its observations."""
    blocks, clip = program.blocks, program.config.normalize.clip_observations
    recurrent_state = blocks.merge(rollout.recurrent_state)
    merged = blocks.merge(rollout._replace(recurrent_state=None), axis=2)._replace(recurrent_state=recurrent_state)
    scale, layout = frozen(state.observation_normalizer), program.net.observation
    seen, final = (normalized(layout, x, scale, clip) for x in (merged.observations, merged.final))
    return merged._replace(observations=seen, final=final)


def compile_learn(
    program: Program, specs: TrainState
) -> Callable[[TrainState, Rollout, ArrayLike, Inputs, ArrayLike, ArrayLike], Learned]:
    """Compiles :meth:`.program.Program.learn` over the mesh for rollouts by shard; it reuses the state's memory."""

    def learn(
        state: TrainState, rollout: Rollout, discounted: Array, inputs: Inputs, stop: Array, owned: Array
    ) -> Learned:
        blocks, merged = program.blocks, _merged_rollout(program, state, rollout)
        owned = jnp.reshape(owned, ())
        state, metrics, carried = program.learn(state, merged, blocks.merge(discounted), inputs, stop, owned)
        return state, metrics, blocks.split(carried)

    given = (specs, SHARDED, SHARDED, REPLICATED, SHARDED, SHARDED)
    return program.compiled(learn, given, (specs, REPLICATED, SHARDED), donated=0)


def compile_first(program: Program, specs: TrainState) -> Callable[[TrainState, Rollout, Array, Array], TrainState]:
    """Compiles the normalisers' first statistics, from a rollout of random actions that was collected on the host."""

    def first(state: TrainState, rollout: Rollout, discounted: Array, owned: Array) -> TrainState:
        def one(rollout: Rollout, discounted: Array) -> NormalizerMoments:
            return normalizer_moments(program.config, program.net, rollout, discounted)[0]

        parts = each_shard(one, program.blocks.shards, jnp.reshape(owned, ()), rollout, discounted)
        return merge_normalizers(state, gather_shards(parts))

    return program.compiled(first, (specs, SHARDED, SHARDED, SHARDED), specs)
