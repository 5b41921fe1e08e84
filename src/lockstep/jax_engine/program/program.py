"""The compiled program: whole iterations over a mesh, from rollout to metrics, without a look at the host.

What a device does is a function of its shards, mapped over the mesh. A call runs a number of iterations that is known
only when it is called, so that one compilation serves them all. Collectives of an iteration: the statistics' one, one a
minibatch, and with several processes one that brings the episodes to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.envs.description import EnvDescription
from lockstep.jax_engine.batch import Batch, columns_of, first_episodes, make_batch
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, TIME_SHARDED, over_mesh
from lockstep.jax_engine.distributed.reductions import gather_shards, shard_index
from lockstep.jax_engine.distributed.shared_memory import unavailable
from lockstep.jax_engine.envs.environments import JaxEnvironment
from lockstep.jax_engine.minibatches import advantage_moments, minibatch_indices, minibatch_statistics
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import ParameterLayout
from lockstep.jax_engine.program.iterations import Inputs, Outputs
from lockstep.jax_engine.rollout import (
    Actor,
    Draws,
    RandomActor,
    Rollout,
    begin,
    collect,
    draw,
)
from lockstep.jax_engine.shards.blocks import Blocks, each_shard, shards_together
from lockstep.jax_engine.shards.keys import key_of, key_words, keyed
from lockstep.jax_engine.shards.normalizers import scale_of
from lockstep.jax_engine.shards.words import Words
from lockstep.jax_engine.state import EnvCarry, TrainState
from lockstep.jax_engine.statistics import (
    LocalStatistics,
    explained_variance,
    fit_moments,
    mean_terms,
    merge_normalizers,
    normalizer_moments,
    share,
)
from lockstep.jax_engine.update import Update, learner_of

PURPOSES = ("action", "reset", "step", "minibatch", "begin", "random", "dropout")


def purpose_words(seed: int) -> np.ndarray:
    """Words of the keys of each purpose, uint32 ``[len(PURPOSES), 2]``."""
    return np.stack([key_words(seed, purpose) for purpose in PURPOSES])


@dataclass(frozen=True)
class Program:
    """What is compiled, and for what.

    Attributes:
        config: the run's.
        description: the environment's spaces.
        net: the networks.
        layout: how parameters are held.
        mesh: the devices.
        env: the environment inside the program; None where it is stepped on the host.
        everywhere: whether episodes are brought to all processes.
        key_words: of each purpose's random key, uint32 ``[len(PURPOSES), 2]``; None: those of the config's seed, which
            the program then holds as constants.
    """

    config: Config
    description: EnvDescription
    net: PolicyNet
    layout: ParameterLayout
    mesh: Any
    env: JaxEnvironment | None
    everywhere: bool
    key_words: Any = None

    @cached_property
    def blocks(self) -> Blocks:
        """How a device's shards are grouped."""
        config, devices = self.config, self.mesh.devices
        shards, rows = config.shards // self.mesh.size, config.envs // config.shards
        exact = config.reduction == "exact"
        return Blocks(shards, rows, exact, 1 if exact else shards_together(shards, rows, devices.flat[0].platform))

    @cached_property
    def apart(self) -> str | None:
        """Why the devices meet by XLA's collectives and not in memory; None: they meet in memory."""
        return unavailable(self.config, list(self.mesh.devices.flat))

    @property
    def transport(self) -> str:
        """How the devices' shards meet: ``none``, ``shared memory`` or ``xla``."""
        if self.mesh.size == 1:
            return "none"
        return "xla" if self.apart else "shared memory"

    def mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """What one device does, over the mesh; see :func:`~lockstep.jax_engine.distributed.mesh.over_mesh`."""
        return over_mesh(function, self.mesh, in_specs, out_specs, shared=self.apart is None)

    @property
    def keys(self) -> dict[str, Array]:
        """Keys of each purpose; made anew at each look, for what is made in one trace doesn't belong into another."""
        words = purpose_words(self.config.seed) if self.key_words is None else self.key_words
        return {purpose: key_of(words[number]) for number, purpose in enumerate(PURPOSES)}

    def shard_ids(self) -> Array:
        """Global indices of this device's shards, int32 ``[shards]``, inside a mapped program."""
        return shard_index() * self.blocks.shards + jnp.arange(self.blocks.shards, dtype=jnp.int32)

    # --- beginnings -------------------------------------------------------------------------------------------------

    def begin_envs(self, state: TrainState, number: int, owned: Array) -> EnvCarry:
        """Begin the first episodes, keyed by ``(seed, "begin", number, shard)``; other ones after other trainings."""
        assert self.env is not None
        return self._begin("begin", jnp.int32(number) - 2 * jnp.asarray(state.optimizer.count), owned, 1)

    def _begin(self, purpose: str, number: Array, owned: Array, group: int) -> EnvCarry:
        env, rows = self.env, self.blocks.rows
        assert env is not None

        def one(shard: Array) -> EnvCarry:
            random = env.reset_random(keyed(self.keys[purpose], number, shard), (rows // group,))
            random = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), random)
            return begin(self.net, env, random, self.net.carry_size)

        return each_shard(one, self.blocks.shards, owned, self.shard_ids())

    def carry_shapes(self) -> EnvCarry:
        """Shapes of what environments carry, by shard of one device."""
        env, rows = self.env, self.blocks.rows
        assert env is not None

        def one(key: Array) -> EnvCarry:
            return begin(self.net, env, env.reset_random(key, (rows,)), self.net.carry_size)

        shapes = jax.eval_shape(one, self.keys["begin"])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.blocks.shards, *x.shape), x.dtype), shapes)

    def first_statistics(self, state: TrainState, owned: Array) -> TrainState:
        """First statistics of normalisers, from a rollout of random actions; afterwards every episode starts anew."""
        env, config = self.env, self.config
        assert env is not None

        def one(carry: EnvCarry, shard: Array) -> Any:
            draws = draw(config, self.net, env, self.keys, jnp.int32(-1), shard)
            steps = jnp.arange(config.num_steps, dtype=jnp.int32)
            noise = jax.vmap(lambda t: keyed(self.keys["random"], shard, t))(steps)
            blank = None if state.observations is None else scale_of(state.observations)
            _, rollout = collect(
                RandomActor(self.net), env, self.description.rewards, config, blank, carry, draws._replace(noise=noise)
            )
            return normalizer_moments(config, self.net, rollout, carry.discounted)[:2]

        parts = each_shard(one, self.blocks.shards, owned, state.envs, self.shard_ids())
        return merge_normalizers(state, *gather_shards(parts))

    def initial(self, state: TrainState, owned: Array) -> TrainState:
        """A state whose environments have begun, and whose normalisers have first statistics."""
        state = state._replace(envs=self.begin_envs(state, 0, owned))
        if state.observations is None and state.returns is None:
            return state
        state = self.first_statistics(state, owned)
        return state._replace(envs=self.begin_envs(state, 1, owned))

    # --- an iteration -----------------------------------------------------------------------------------------------

    def rollout(self, state: TrainState, parameters: Any, iteration: Array, owned: Array) -> tuple[Any, Rollout]:
        """Step this device's environments; carries and rollouts by block."""
        env, config, blocks = self.env, self.config, self.blocks
        assert env is not None
        envs = state.envs
        if config.algorithm == "grpo":
            envs = self._begin("begin", iteration + 2, owned, config.group_size)
        keys = self.keys
        draws = each_shard(
            lambda shard: draw(config, self.net, env, keys, iteration, shard), blocks.shards, owned, self.shard_ids()
        )
        draws = Draws(*(blocks.merge(part, axis=2) for part in draws))
        scale = None if state.observations is None else scale_of(state.observations)

        def one(carry: EnvCarry, draws: Draws) -> tuple[EnvCarry, Rollout]:
            actor = Actor(self.net, parameters)
            return collect(actor, env, self.description.rewards, config, scale, carry, draws)

        return blocks.each(one, owned, blocks.merge(envs), draws)

    def learn(
        self, state: TrainState, rollout: Rollout, discounted: Array, inputs: Inputs, stop: Array, owned: Array
    ) -> tuple[TrainState, dict[str, Array], Any]:
        """Advantages, statistics, update, metrics.

        Args:
            state: before the update.
            rollout: by block, ``[blocks, T, n, …]``.
            discounted: discounted returns before the rollout ``[blocks, n]``.
            inputs: of this iteration.
            stop: this process's stop code ``[1]``.
            owned: number of shards.

        Returns:
            State (without environments), metrics, and what environments carry on: memory ``[blocks, n, …]`` and
            discounted returns ``[blocks, n]``.
        """
        config, net, blocks = self.config, self.net, self.blocks
        parameters = self.layout.named(state.parameters)
        reference = None if state.reference is None else self.layout.named(state.reference)
        indices = self._indices(inputs.iteration, owned)
        rewards_scale = None if state.returns is None else scale_of(state.returns)

        def one(rollout: Rollout, discounted: Array, index: Array) -> Any:
            batch, memory = make_batch(net, parameters, reference, rollout, config, rewards_scale)
            observations, returns, discounted = normalizer_moments(config, net, rollout, discounted)
            advantages = self._advantage_moments(batch, index)
            terms = jnp.stack(list(rollout.terms.values())) if rollout.terms else None
            statistics = LocalStatistics(advantages, fit_moments(batch), observations, returns, terms)
            columns = columns_of(batch)
            return Words.of(columns).pack(columns), statistics, memory, discounted

        samples, local, memory, discounted = blocks.each(one, owned, rollout, discounted, indices)
        advantages = local.advantages
        if blocks.together > 1:  # [blocks, together, …]
            advantages = advantages.reshape(blocks.shards, *advantages.shape[2:])
        shared = share(local._replace(advantages=advantages), stop)
        statistics = minibatch_statistics(config, advantages, shared.statistics.advantages, blocks)
        update = Update(config, net, self.layout, blocks, self._words(rollout), self.mesh.size)
        rate = state.learning_rate if config.ppo.schedule == "adaptive" else inputs.learning_rate
        learner, result = update(
            learner_of(state, rate), samples, indices, statistics, self._dropout(inputs.iteration), owned
        )
        after = merge_normalizers(state, shared.statistics.observations, shared.statistics.returns)
        after = after._replace(**learner._asdict())
        metrics = {**result._asdict(), "stop": shared.stop, "learning_rate": learner.learning_rate}
        metrics |= mean_terms(list(rollout.terms), shared.statistics.terms)
        if shared.statistics.fit is not None:
            metrics["explained_variance"] = explained_variance(shared.statistics.fit)
        return after, metrics, (memory, discounted)

    def _indices(self, iteration: Array, owned: Array) -> Array:
        key = self.keys["minibatch"]
        index = each_shard(
            lambda shard: minibatch_indices(self.config, key, iteration, shard),
            self.blocks.shards,
            owned,
            self.shard_ids(),
        )
        return self.blocks.merge_indices(index)

    def _advantage_moments(self, batch: Batch, index: Array) -> Array:
        if self.blocks.together == 1:
            return advantage_moments(batch.advantages, batch.valid, index)
        by_shard = index.reshape(*index.shape[:2], self.blocks.together, -1)
        of = jax.vmap(lambda part: advantage_moments(batch.advantages, batch.valid, part), in_axes=2)
        return of(by_shard)

    def _words(self, rollout: Rollout) -> Words:
        """How columns lie in a block's matrix, by their shapes alone."""
        config, net = self.config, self.net
        parameters = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in self.layout.shapes.items()}
        reference = parameters if config.algorithm == "grpo" and config.grpo.kl_coef else None
        scale = (jnp.zeros(1), jnp.ones(1)) if config.normalize.returns else None
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rollout)
        batch = jax.eval_shape(lambda p, r, x: make_batch(net, p, r, x, config, scale)[0], parameters, reference, one)
        return Words.of(columns_of(batch))

    def _dropout(self, iteration: Array) -> Any:
        if self.net.custom is None:
            return None
        first = self.shard_ids()[:: self.blocks.together]
        return jax.vmap(lambda shard: keyed(self.keys["dropout"], iteration, shard))(first)

    def iteration(self, state: TrainState, inputs: Inputs, stop: Array, owned: Array) -> tuple[TrainState, Outputs]:
        """One whole iteration of this device."""
        blocks = self.blocks
        envs, rollout = self.rollout(state, self.layout.named(state.parameters), inputs.iteration, owned)
        state, metrics, (memory, discounted) = self.learn(state, rollout, envs.discounted, inputs, stop, owned)
        envs = envs._replace(memory=memory, discounted=discounted)
        return state._replace(envs=blocks.split(envs)), self.outputs(rollout, metrics)

    def outputs(self, rollout: Rollout, metrics: dict[str, Array]) -> Outputs:
        """What the host is told: metrics, and the episodes that ended."""
        over = rollout.over
        if self.config.algorithm == "grpo":  # an environment's first episode counts, also where the end cut it
            last = jnp.arange(over.shape[1])[:, None] == over.shape[1] - 1
            over = jax.vmap(first_episodes)(rollout) & (over | last)
        marks = jnp.where(over, rollout.lengths * 4 + rollout.successes.astype(jnp.int32) + 2, 0)
        returns, marks = self.blocks.split((rollout.returns, marks), axis=2)
        if self.everywhere:
            both = jnp.stack([lax.bitcast_convert_type(returns, jnp.int32), marks], -1)
            both = gather_shards(both)
            returns, marks = lax.bitcast_convert_type(both[..., 0], jnp.float32), both[..., 1]
        return Outputs(metrics, returns, marks)

    # --- compiled -----------------------------------------------------------------------------------------------------

    def compile_initial(self, specs: TrainState, without: TrainState) -> Any:
        """:meth:`initial` over the mesh; ``without`` are the specs of a state without environments."""
        return jax.jit(self.mapped(self.initial, (without, REPLICATED), specs))

    def call(
        self, state: TrainState, inputs: Inputs, stop: Array, owned: Array, count: Array
    ) -> tuple[TrainState, Outputs]:
        """``count`` iterations; outputs ``[n, …]``, of which the first ``count`` are filled."""
        n = len(inputs.iteration)
        if n == 1:
            state, outputs = self.iteration(state, jax.tree.map(lambda x: x[0], inputs), stop, owned)
            return state, jax.tree.map(lambda x: x[None], outputs)
        first = jax.tree.map(lambda x: x[0], inputs)
        shapes = jax.eval_shape(lambda s: self.iteration(s, first, stop, owned)[1], state)
        empty = jax.tree.map(lambda s: jnp.zeros((n, *s.shape), s.dtype), shapes)

        def body(i: Array, carry: Any) -> Any:
            state, outputs = carry
            state, one = self.iteration(state, jax.tree.map(lambda x: x[i], inputs), stop, owned)
            kept = jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, i, 0), outputs, one)
            return state, kept

        return lax.fori_loop(0, count, body, (state, empty))

    def compile_call(self, specs: TrainState) -> Any:
        """:meth:`call` over the mesh; the state's memory is reused."""
        episodes: Any = REPLICATED if self.everywhere else TIME_SHARDED
        outputs = Outputs(REPLICATED, episodes, episodes)  # type: ignore[arg-type]
        mapped = self.mapped(self.call, (specs, REPLICATED, SHARDED, REPLICATED, REPLICATED), (specs, outputs))
        return jax.jit(mapped, donate_argnums=0)
