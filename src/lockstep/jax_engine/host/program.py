"""The update as a compiled program of its own, for rollouts that were collected on the host."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED
from lockstep.jax_engine.distributed.reductions import gather_shards
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.normalizers import normalized, scale_of
from lockstep.jax_engine.state import TrainState
from lockstep.jax_engine.statistics import merge_normalizers, normalizer_moments


class HostProgram:
    """What is compiled where environments are stepped on the host.

    Args:
        program: the iteration that they are parts of.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def merged_rollout(self, state: TrainState, rollout: Rollout) -> Rollout:
        """A rollout by shard ``[shards, T, rows, …]`` as blocks, with observations as the networks see them."""
        blocks, clip = self.program.blocks, self.program.config.normalize.clip_observations
        parts: dict[str, Any] = {
            name: x if x is None or name == "terms" else blocks.merge(x, axis=1 if name == "memory" else 2)
            for name, x in rollout._asdict().items()
        }
        merged = Rollout(**parts)
        if state.observations is None:
            return merged
        scale, layout = scale_of(state.observations), self.program.net.observation
        seen, final = (normalized(layout, x, scale, clip) for x in (merged.observations, merged.final))
        return merged._replace(observations=seen, final=final)

    def learn_from_host(
        self, state: TrainState, rollout: Rollout, discounted: Array, inputs: Inputs, stop: Array, owned: Array
    ) -> tuple[TrainState, dict[str, Array], Any]:
        """:meth:`learn` of a rollout by shard ``[shards, T, rows, …]`` that was collected on the host."""
        blocks, merged = self.program.blocks, self.merged_rollout(state, rollout)
        state, metrics, carried = self.program.learn(state, merged, blocks.merge(discounted), inputs, stop, owned)
        return state, metrics, blocks.split(carried)

    def compile_learn(self, specs: TrainState) -> Any:
        """:meth:`learn_from_host` over the mesh; the state's memory is reused."""
        mapped = self.program.mapped(
            self.learn_from_host,
            (specs, SHARDED, SHARDED, REPLICATED, SHARDED, REPLICATED),
            (specs, REPLICATED, SHARDED),
        )
        return jax.jit(mapped, donate_argnums=0)

    def compile_first(self, specs: TrainState) -> Any:
        """First statistics of normalisers, of a random policy's rollout that was collected on the host."""

        def first(state: TrainState, rollout: Rollout, discounted: Array, owned: Array) -> TrainState:
            def one(rollout: Rollout, discounted: Array) -> Any:
                return normalizer_moments(self.program.config, self.program.net, rollout, discounted)[:2]

            parts = each_shard(one, self.program.blocks.shards, owned, rollout, discounted)
            return merge_normalizers(state, *gather_shards(parts))

        return jax.jit(self.program.mapped(first, (specs, SHARDED, SHARDED, REPLICATED), specs))
