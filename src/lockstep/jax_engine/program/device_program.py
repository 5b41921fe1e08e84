"""Compiles iterations whose environments are stepped inside the program, over a mesh."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, TIME_SHARDED, Specs
from lockstep.jax_engine.distributed.reductions import gather_shards
from lockstep.jax_engine.groups import mark_finished_episodes
from lockstep.jax_engine.nets.parameters import Named
from lockstep.jax_engine.program.iterations import Inputs, Outputs
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Actor, Draws, RandomActor, Rollout, begin, collect, draw, for_members
from lockstep.jax_engine.shards.blocks import each_shard, traced_once
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.normalizers import frozen
from lockstep.jax_engine.shards.packing import PackedLayout
from lockstep.jax_engine.state import EnvCarry, TrainState
from lockstep.jax_engine.statistics import NormalizerMoments, merge_normalizers, normalizer_moments

Call = Callable[[TrainState, Inputs, Array, Array, Array], tuple[TrainState, Outputs, Array]]
"""A compiled :meth:`DeviceProgram.call_of_host`."""


class DeviceProgram:
    """Whole iterations of one device, from rollout to metrics, with the environment inside the program.

    Attributes:
        metrics: layout of the metrics in a call's outputs; known once a call has been traced.
    """

    metrics: PackedLayout

    def __init__(self, program: Program) -> None:
        assert program.env is not None, "its environment is stepped on the host"
        self.program, self.env = program, program.env
        self.config, self.net, self.blocks = program.config, program.net, program.blocks

    # --- beginnings -------------------------------------------------------------------------------------------------

    def begin_envs(self, state: TrainState, number: int, owned: Array) -> EnvCarry:
        """Begins first episodes, keyed by ``number``, the optimiser's step and the shard."""
        return self._begin(jnp.int32(number) - 2 * jnp.asarray(state.optimizer.count), owned, 1)

    def _begin(self, number: Array, owned: Array, group: int) -> EnvCarry:
        env, rows = self.env, self.blocks.rows

        def one(shard: Array) -> EnvCarry:
            random = env.reset_random(keyed(self.program.keys["begin"], number, shard), (rows // group,))
            return begin(self.net, env, for_members(random, group, axis=0))

        return self.program.each_shard(one, owned)

    def carry_shapes(self) -> EnvCarry:
        """Returns the shapes of the environments' state, by shard of one device."""
        env, rows = self.env, self.blocks.rows

        def one(key: Array) -> EnvCarry:
            return begin(self.net, env, env.reset_random(key, (rows,)))

        shapes = jax.eval_shape(one, self.program.keys["begin"])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.blocks.shards, *x.shape), x.dtype), shapes)

    def first_statistics(self, state: TrainState, owned: Array) -> TrainState:
        """Fills the normalisers from a rollout of random actions; the caller begins episodes anew afterwards."""
        env, config = self.env, self.config
        assert state.envs is not None

        def one(carry: EnvCarry, shard: Array) -> NormalizerMoments:
            draws = draw(config, self.net, env, self.program.keys, jnp.int32(-1), shard, 1)
            steps = jnp.arange(config.num_steps, dtype=jnp.int32)
            noise = jax.vmap(lambda t: keyed(self.program.keys["random"], shard, t))(steps)
            rewards, blank = self.program.description.rewards, frozen(state.observation_normalizer)
            draws = draws._replace(noise=noise)
            _, rollout = collect(RandomActor(self.net), env, rewards, config, blank, carry, draws)
            return normalizer_moments(config, self.net, rollout, carry.discounted)[0]

        parts = each_shard(one, self.blocks.shards, owned, state.envs, self.program.shard_ids())
        return merge_normalizers(state, gather_shards(parts))

    def initial(self, state: TrainState, owned: Array) -> TrainState:
        """Begins the environments of a state, and fills its normalisers with first statistics."""
        owned = jnp.reshape(owned, ())
        state = state._replace(envs=self.begin_envs(state, 0, owned))
        if state.observation_normalizer is None and state.return_normalizer is None:
            return state
        state = self.first_statistics(state, owned)
        return state._replace(envs=self.begin_envs(state, 1, owned))

    # --- an iteration -----------------------------------------------------------------------------------------------

    def rollout(self, state: TrainState, parameters: Named, iteration: Array, owned: Array) -> tuple[EnvCarry, Rollout]:
        """Steps this device's environments; returns their state after the rollout, and the rollout, by block."""
        env, config, blocks = self.env, self.config, self.blocks
        envs = state.envs
        if config.algorithm == "grpo":
            envs = self._begin(iteration + 2, owned, config.group_size)
        assert envs is not None
        keys, users = self.program.keys, self.program.collect
        if users is not None:
            first = self.program.shard_ids()[:: blocks.together]
            each = jax.vmap(lambda shard: keyed(keys["action"], iteration, shard))(first)
            actor, seen = Actor(self.net, parameters), frozen(state.observation_normalizer)
            return blocks.each(
                lambda carry, key: users(self.program, actor, seen, carry, key), owned, blocks.merge(envs), each
            )
        draws = self.program.each_shard(
            lambda shard: draw(config, self.net, env, keys, iteration, shard, config.group_size), owned
        )
        draws = Draws(*(blocks.merge(part, axis=2) for part in draws))
        scale = frozen(state.observation_normalizer)

        def one(carry: EnvCarry, draws: Draws) -> tuple[EnvCarry, Rollout]:
            actor = Actor(self.net, parameters)
            return collect(actor, env, self.program.description.rewards, config, scale, carry, draws)

        return blocks.each(one, owned, blocks.merge(envs), draws)

    def iteration(self, state: TrainState, inputs: Inputs, stop: Array, owned: Array) -> tuple[TrainState, Outputs]:
        """Runs one whole iteration of this device."""
        blocks = self.blocks
        with jax.named_scope("rollout"):
            envs, rollout = self.rollout(state, self.program.layout.named(state.parameters), inputs.iteration, owned)
        state, metrics, carried = self.program.learn(state, rollout, envs.discounted, inputs, stop, owned)
        return state._replace(envs=blocks.split(envs._replace(**carried._asdict()))), self.outputs(
            rollout, metrics, owned
        )

    def outputs(self, rollout: Rollout, metrics: dict[str, Array], owned: Array) -> Outputs:
        """Collects the outputs for the host: metrics, and the episodes that ended in this device's own shards."""
        over = jax.vmap(mark_finished_episodes)(rollout) if self.config.algorithm == "grpo" else rollout.over
        if not self.blocks.even:
            over = over & (jnp.arange(len(over)) < owned)[:, None, None]
        marks = jnp.where(over, rollout.lengths * 4 + rollout.successes.astype(jnp.int32) + 2, 0)
        returns, marks = self.blocks.split((rollout.returns, marks), axis=2)
        if self.program.everywhere:
            both = gather_shards(jnp.stack([lax.bitcast_convert_type(returns, jnp.int32), marks], -1))
            returns, marks = lax.bitcast_convert_type(both[..., 0], jnp.float32), both[..., 1]
        return Outputs(metrics, returns, marks)

    # --- compiled -----------------------------------------------------------------------------------------------------

    @property
    def call_specs(self) -> Outputs:
        """The specs of a call's outputs on the mesh."""
        episodes: Specs = REPLICATED if self.program.everywhere else TIME_SHARDED
        return Outputs(REPLICATED, episodes, episodes)  # pyright: ignore[reportArgumentType]

    def call(
        self, state: TrainState, inputs: Inputs, stop: Array, owned: Array, count: Array
    ) -> tuple[TrainState, Outputs]:
        """Runs ``count`` iterations; returns outputs ``[n, …]``, of which the first ``count`` are filled.

        ``owned`` is this device's number of shards ``[1]``.
        """
        n, owned = len(inputs.iteration), jnp.reshape(owned, ())
        if n == 1:
            state, outputs = self.iteration(state, jax.tree.map(lambda x: x[0], inputs), stop, owned)
            return state, jax.tree.map(lambda x: x[None], outputs)
        first = jax.tree.map(lambda x: x[0], inputs)
        iteration = traced_once(lambda state, inputs: self.iteration(state, inputs, stop, owned))
        shapes = jax.eval_shape(iteration, state, first)[1]
        empty = jax.tree.map(lambda s: jnp.zeros((n, *s.shape), s.dtype), shapes)

        def body(i: Array, carry: tuple[TrainState, Outputs]) -> tuple[TrainState, Outputs]:
            state, outputs = carry
            state, one = iteration(state, jax.tree.map(lambda x: x[i], inputs))
            return state, jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, i, 0), outputs, one)

        return lax.fori_loop(0, count, body, (state, empty))

    def call_of_host(
        self, state: TrainState, inputs: Inputs, stop: Array, owned: Array, count: Array
    ) -> tuple[TrainState, Outputs, Array]:
        """Runs ``count`` iterations as :meth:`call` does, and packs the outputs for the host.

        Metrics are one matrix of words ``[n, words]``; see :attr:`metrics`. The third result holds the numbers of the
        iterations that follow, int32 ``[n]``, so that the host needn't place them for the next call.
        """
        state, outputs = self.call(state, inputs, stop, owned, count)
        self.metrics = PackedLayout.of(outputs.metrics)
        packed = self.metrics.pack(outputs.metrics)
        return state, outputs._replace(metrics=packed), inputs.iteration + count

    def compile_call(self, specs: TrainState) -> Call:
        """Compiles :meth:`call_of_host` over the mesh; the program reuses the state's memory."""
        given = (specs, REPLICATED, SHARDED, SHARDED, REPLICATED)
        return self.program.compiled(self.call_of_host, given, (specs, self.call_specs, REPLICATED), donated=0)
