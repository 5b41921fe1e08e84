"""Compiles whole iterations over a mesh, from rollout to metrics, without going back to the host.

The program is a function of a device's shards, mapped over the mesh. A call runs a number of iterations that is known
only when it is called, so that one compilation serves all calls. The collectives of an iteration are one for the
statistics, one per minibatch, and with several processes one that brings the episodes to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.tree import Tree, tree_of
from lockstep.envs.description import EnvDescription
from lockstep.jax_engine.batch import Batch, make_batch
from lockstep.jax_engine.distributed.mesh import Mesh, Specs, laid_out, over_mesh, platform_of
from lockstep.jax_engine.distributed.reductions import device_index, of_device
from lockstep.jax_engine.distributed.shared_memory import unavailable
from lockstep.jax_engine.envs.protocol import JaxEnvironment
from lockstep.jax_engine.minibatches import advantage_moments, minibatch_indices, minibatch_statistics
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import ParameterLayout
from lockstep.jax_engine.periodic import PeriodicUpdate
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.rollout import Actor, Rollout
from lockstep.jax_engine.setup.set_up import COMPILER_OPTIONS
from lockstep.jax_engine.shards.blocks import Blocks, each_shard, shards_together
from lockstep.jax_engine.shards.keys import key_of, key_words, keyed
from lockstep.jax_engine.shards.normalizers import Scale, frozen
from lockstep.jax_engine.shards.packing import PackedLayout
from lockstep.jax_engine.shards.rows import ShardRows
from lockstep.jax_engine.state import EnvCarry, TrainState
from lockstep.jax_engine.statistics import (
    NormalizerMoments,
    Statistics,
    explained_variance,
    finite_statistics,
    mean_terms,
    merge_normalizers,
    moments_of_values,
    normalizer_moments,
    share,
)
from lockstep.jax_engine.update import Gradients, Learner, Update, all_minibatches
from lockstep.training.losses import loss_settings

PURPOSES = ("action", "reset", "step", "minibatch", "begin", "random", "dropout")

Result = TypeVar("Result")


def purpose_words(seed: int) -> np.ndarray:
    """Returns the words of each purpose's key, uint32 ``[len(PURPOSES), 2]``."""
    return np.stack([key_words(seed, purpose) for purpose in PURPOSES])


class Carried(NamedTuple):
    """State that environments carry from one rollout to the next, by block or shard, float32.

    Recurrent states are ``[…, n, state_size]``, discounted returns so far ``[…, n]``.
    """

    recurrent_state: Array
    discounted: Array


Collect = Callable[["Program", Actor, Scale | None, EnvCarry, Array], tuple[EnvCarry, Rollout]]


@dataclass(frozen=True)
class Program:
    """Says what is compiled, and for what.

    Attributes:
        env: the environment inside the program; None if it is stepped on the host.
        everywhere: whether episodes are brought to all processes.
        key_words: of each purpose's random key, uint32 ``[len(PURPOSES), 2]``; None: those of the config's seed, as
            constants.
        collect: a user's own rollout of a block, in place of :func:`~lockstep.jax_engine.rollout.collect`. It takes the
            program, the actor, the scale of observations, the environments' state, and a key of
            ``(seed, "action", iteration, shard)``. Its Rollout has no outputs.
        planned_for: platform that the program is made for, if the mesh stands in for another's; None: the mesh's own.
    """

    config: Config
    description: EnvDescription
    net: PolicyNet
    layout: ParameterLayout
    mesh: Mesh
    env: JaxEnvironment | None
    everywhere: bool
    key_words: Array | None = None
    collect: Collect | None = None
    planned_for: str | None = None

    @property
    def platform(self) -> str:
        """The platform by which shards are grouped and computation is cut into parts."""
        return self.planned_for or platform_of(self.mesh)

    @property
    def tree(self) -> Tree:
        """How the run's shards are added, and divided between devices."""
        return tree_of(self.config.shards, self.mesh.size)

    @cached_property
    def rows(self) -> ShardRows:
        """Where shards lie in arrays over the mesh."""
        return ShardRows(self.tree)

    @cached_property
    def blocks(self) -> Blocks:
        """How a device's shards are grouped."""
        config = self.config
        shards, rows = self.tree.most_shards, config.envs // config.shards
        exact = config.reduction == "exact"
        alone = exact or not self.tree.even
        together = 1 if alone else shards_together(shards, rows, self.platform)
        return Blocks(shards, rows, exact, together, self.tree.even)

    @cached_property
    def apart(self) -> str | None:
        """Why the devices use XLA's collectives and not memory; None if they exchange data in memory."""
        return unavailable(self.config, list(self.mesh.devices.flat))

    @property
    def transport(self) -> str:
        """How the devices exchange data: ``none``, ``shared memory`` or ``xla``."""
        if self.mesh.size == 1:
            return "none"
        return "xla" if self.apart else "shared memory"

    @property
    def sums(self) -> str:
        """How all shards' gradients are summed: ``none``, ``gather``, ``slices``, or the framework's ``all-reduce``."""
        if self.mesh.size == 1:
            return "none"
        if self.config.reduction == "fast" and (self.platform != "cpu" or self.layout.axes):
            return "all-reduce"
        tree = self.tree if self.config.reduction == "exact" else tree_of(self.mesh.size, self.mesh.size)
        size = self.layout.size + len(loss_settings(self.config).terms)
        return "slices" if tree.sliced(size * np.dtype(np.float32).itemsize) else "gather"

    def mapped(self, function: Callable[..., Result], in_specs: Specs, out_specs: Specs) -> Callable[..., Result]:
        """Maps a function of one device over the mesh; see :func:`~lockstep.jax_engine.distributed.mesh.over_mesh`."""
        return over_mesh(function, self.mesh, in_specs, out_specs, self.tree, shared=self.apart is None)

    def compiled(
        self, function: Callable[..., Result], in_specs: Specs, out_specs: Specs, donated: int | None = None
    ) -> Callable[..., Result]:
        """Compiles :meth:`mapped`; the program reuses the memory of the ``donated``-th argument, if it is given."""
        mapped, given = self.mapped(function, in_specs, out_specs), () if donated is None else (donated,)
        return jax.jit(
            mapped,
            out_shardings=laid_out(self.mesh, out_specs),
            donate_argnums=given,
            compiler_options=COMPILER_OPTIONS,
        )

    @property
    def keys(self) -> dict[str, Array]:
        """Keys by purpose; made anew each time, because an array made in one trace can't be used in another."""
        words = purpose_words(self.config.seed) if self.key_words is None else self.key_words
        return {purpose: key_of(words[number]) for number, purpose in enumerate(PURPOSES)}

    def shard_ids(self) -> Array:
        """Returns the global indices of this device's shards, int32 ``[shards]``, inside a mapped program.

        Indices beyond its own are the next device's; their results aren't used.
        """
        shards = jnp.arange(self.blocks.shards, dtype=jnp.int32)
        if self.tree.even:
            return device_index() * self.blocks.shards + shards
        return of_device([own.start for own in self.tree.owned]) + shards

    def each_shard(self, function: Callable[[Array], Result], owned: Array) -> Result:
        """Calls a function of a shard's global index for each of this device's shards.

        See :func:`.blocks.each_shard`.
        """
        return each_shard(function, self.blocks.shards, owned, self.shard_ids())

    def learn(
        self, state: TrainState, rollout: Rollout, discounted: Array, inputs: Inputs, stop: Array, owned: Array
    ) -> tuple[TrainState, dict[str, Array], Carried]:
        """Computes advantages and statistics of a rollout, updates the parameters, and collects metrics.

        The rollout is by block, ``[blocks, T, n, …]``. ``discounted`` are the discounted returns before it
        ``[blocks, n]``, ``stop`` is this process's stop code ``[1]``, and ``owned`` the number of shards.

        Returns:
            The state (its environments unchanged), metrics, and what environments carry on, by block.
        """
        config, blocks = self.config, self.blocks
        with jax.named_scope("evaluate"):
            indices, columns, (samples, local, carried) = self._evaluated(
                state, rollout, discounted, inputs.iteration, owned
            )
        moments = local.advantage_moments
        if blocks.together > 1:  # [blocks, together, …]
            moments = moments.reshape(blocks.shards, *moments.shape[2:])
        everyone, asked = share(local._replace(advantage_moments=moments), stop)
        statistics = minibatch_statistics(config, moments, everyone.advantage_moments, blocks)
        rate = state.learning_rate if config.ppo.schedule == "adaptive" else inputs.learning_rate
        numbers, minibatches = all_minibatches(config, indices, statistics, self._dropout(inputs.iteration))
        gradients = Gradients(
            config, self.net, self.layout, blocks, columns, self.mesh.size, self.platform, inputs.coefficients
        )
        update = PeriodicUpdate(gradients) if config.sync_period > 1 else Update(gradients)
        learner = Learner(state.parameters, state.optimizer, rate)
        with jax.named_scope("optimizer"):
            learner, result = update(learner, samples, numbers, minibatches, owned)
        merged = NormalizerMoments(everyone.observation_moments, everyone.return_moments)
        after = merge_normalizers(state, merged)._replace(**learner._asdict())
        metrics = finite_statistics(after)
        metrics |= {**result._asdict(), "stop": asked, "learning_rate": learner.learning_rate}
        metrics |= mean_terms(list(rollout.terms), everyone.terms)
        if everyone.value_moments is not None:
            metrics["explained_variance"] = explained_variance(everyone.value_moments)
        return after, metrics, carried

    def _evaluated(
        self, state: TrainState, rollout: Rollout, discounted: Array, iteration: Array, owned: Array
    ) -> tuple[Array, PackedLayout, tuple[Array, Statistics, Carried]]:
        """Makes batches and local statistics of a rollout by block.

        Returns:
            The minibatches' indices by block; the layout of the packed columns; and by block the samples packed in a
            matrix ``[blocks, units, words]``, this device's statistics, and what is carried into the next rollout.
        """
        config, net, platform = self.config, self.net, self.platform
        parameters = self.layout.named(state.parameters)
        reference = None if state.reference is None else self.layout.named(state.reference)
        indices, scale = self._indices(iteration, owned), frozen(state.return_normalizer)
        layouts: list[PackedLayout] = []

        def one(rollout: Rollout, discounted: Array, index: Array) -> tuple[Array, Statistics, Carried]:
            batch, recurrent_state = make_batch(net, parameters, reference, rollout, config, scale, platform)
            moments, after = normalizer_moments(config, net, rollout, discounted)
            advantages = self._advantage_moments(batch, index)
            terms = jnp.stack(list(rollout.terms.values())) if rollout.terms else None
            statistics = Statistics(advantages, moments_of_values(batch), moments.observations, moments.returns, terms)
            columns = batch.columns()
            layouts.append(PackedLayout.of(columns))
            return layouts[-1].pack(columns), statistics, Carried(recurrent_state, after)

        evaluated = self.blocks.each(one, owned, rollout, discounted, indices)
        return indices, layouts[-1], evaluated

    def _indices(self, iteration: Array, owned: Array) -> Array:
        key = self.keys["minibatch"]
        index = self.each_shard(lambda shard: minibatch_indices(self.config, key, iteration, shard), owned)
        return self.blocks.merge_indices(index)

    def _advantage_moments(self, batch: Batch, index: Array) -> Array:
        if self.blocks.together == 1:
            return advantage_moments(batch.advantages, batch.valid, index)
        of = jax.vmap(lambda part: advantage_moments(batch.advantages, batch.valid, part), in_axes=2)
        return of(index.reshape(*index.shape[:2], self.blocks.together, -1))

    def _dropout(self, iteration: Array) -> Array | None:
        if self.net.custom is None:
            return None
        first = self.shard_ids()[:: self.blocks.together]
        return jax.vmap(lambda shard: keyed(self.keys["dropout"], iteration, shard))(first)
