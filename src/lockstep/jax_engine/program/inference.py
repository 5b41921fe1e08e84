"""Runs the policy by itself, on one device of this process, shard by shard: for environments on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import jax
from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from lockstep.jax_engine.distributed.placement import first_copy
from lockstep.jax_engine.nets import distributions
from lockstep.jax_engine.nets.parameters import Named
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Actor, action_noise
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.normalizers import Scale, normalized, scale_of
from lockstep.jax_engine.state import TrainState


class Inferred(NamedTuple):
    """What the policy does with rows ``[k, n, width]``.

    Attributes:
        actions: ``[k, n, …]``.
        recurrent_state: after the step, float32 ``[k, n, carry_size]``.
    """

    actions: Array
    recurrent_state: Array


Act = Callable[[Named, Scale | None, ArrayLike, Array, ArrayLike, Array, Array, Array], Inferred]
MostLikely = Callable[[Named, Scale | None, ArrayLike, Array, ArrayLike, Array], Inferred]


class Inference:
    """Compiles functions of a program's networks.

    Args:
        program: of which networks and settings are taken.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def local_parameters(self, state: TrainState) -> Named:
        """Gives whole parameters by name on this process's first device; with FSDP a collective."""
        return self.program.layout.local(state.parameters)

    def local_scale(self, state: TrainState) -> Scale | None:
        """Computes the scale of observations on this process's first device, or None."""
        if state.observation_normalizer is None:
            return None
        return self._scale(jax.tree.map(first_copy, state.observation_normalizer))

    @cached_property
    def _scale(self) -> Callable[..., Scale]:
        return jax.jit(scale_of)

    @cached_property
    def act(self) -> Act:
        """Samples actions on one device, for some shards of this process, whose environments are on the host.

        Takes parameters, the scale of observations (or None), rows ``[k, n, width]`` as environments gave them, the
        recurrent state, where an episode just ended ``[k, n]``, noise ``[k, T, n, …]``, the step, and ``k``.
        """
        net, clip = self.program.net, self.program.config.normalize.clip_observations

        def act(
            named: Named,
            scale: Scale | None,
            rows: Array,
            recurrent_state: Array,
            ended: Array,
            noise: Array,
            t: Array,
            owned: Array,
        ) -> Inferred:
            def one(rows: Array, recurrent_state: Array, ended: Array, noise: Array) -> Inferred:
                seen = normalized(net.observation, rows, scale, clip)
                kept = jnp.where(ended[:, None], 0.0, recurrent_state)
                acted = Actor(net, named)(seen, kept, noise[t])
                return Inferred(acted.actions, acted.recurrent_state)

            return each_shard(one, len(rows), owned, rows, recurrent_state, ended, noise)

        return jax.jit(act)

    @cached_property
    def most_likely(self) -> MostLikely:
        """Gives the most likely actions, squashed; takes what :attr:`act` does but noise and step."""
        net, clip = self.program.net, self.program.config.normalize.clip_observations

        def act(
            named: Named, scale: Scale | None, rows: Array, recurrent_state: Array, ended: Array, owned: Array
        ) -> Inferred:
            def one(rows: Array, recurrent_state: Array, ended: Array) -> Inferred:
                seen = normalized(net.observation, rows, scale, clip)
                zeros = jnp.zeros((len(rows), net.action.outputs))
                kept = jnp.where(ended[:, None], 0.0, recurrent_state)
                acted = Actor(net, named)(seen, kept, zeros)
                likeliest = distributions.squash(net, distributions.mode(net, acted.outputs))
                return Inferred(likeliest, acted.recurrent_state)

            return each_shard(one, len(rows), owned, rows, recurrent_state, ended)

        return jax.jit(act)

    @cached_property
    def noise(self) -> Callable[[Array, Array, Array], Array]:
        """Draws some shards' action noise: of iteration, shards ``[k]`` and ``k``, float32 ``[k, T, rows, …]``."""

        def noise(iteration: Array, shards: Array, owned: Array) -> Array:
            key = self.program.keys["action"]
            return each_shard(
                lambda shard: action_noise(self.program.config, self.program.net, key, iteration, shard),
                len(shards),
                owned,
                shards,
            )

        return jax.jit(noise)
