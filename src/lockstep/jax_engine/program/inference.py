"""Runs the policy outside the program, on one device of this process, shard by shard, for environments on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import jax
from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from lockstep.jax_engine.distributed.placement import first_copy
from lockstep.jax_engine.nets import distributions
from lockstep.jax_engine.nets.parameters import Named
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Acted, Actor, action_noise
from lockstep.jax_engine.setup.set_up import COMPILER_OPTIONS
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.normalizers import Scale, normalized, scale_of
from lockstep.jax_engine.state import TrainState

Inferred = tuple[Array, Array]
"""Actions ``[k, n, …]``, and the recurrent state after the step, float32 ``[k, n, state_size]``."""


class Inference:
    """Compiles functions of a program's networks, each at its first use."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def local_parameters(self, state: TrainState) -> Named:
        """Returns whole parameters by name on this process's first device; with FSDP a collective."""
        return self.program.layout.local(state.parameters)

    def local_scale(self, state: TrainState) -> Scale | None:
        """Computes the scale of observations on this process's first device; None if they aren't normalised."""
        if state.observation_normalizer is None:
            return None
        return self._scale(jax.tree.map(first_copy, state.observation_normalizer))

    @cached_property
    def _scale(self) -> Callable[..., Scale]:
        return jax.jit(scale_of)

    def _acted(
        self, named: Named, scale: Scale | None, rows: Array, recurrent_state: Array, ended: Array, noise: Array
    ) -> Acted:
        net = self.program.net
        seen = normalized(net.observation, rows, scale, self.program.config.normalize.clip_observations)
        return Actor(net, named)(seen, jnp.where(ended[:, None], 0.0, recurrent_state), noise)

    @cached_property
    def act(self) -> Callable[[Named, Scale | None, ArrayLike, Array, ArrayLike, Array, Array, Array], Inferred]:
        """Samples actions on one device for ``k`` of this process's shards, whose environments are on the host.

        The function takes the parameters, the scale of observations (or None), rows ``[k, n, width]`` as the
        environments gave them, the recurrent state, where an episode has just ended ``[k, n]``, noise ``[k, T, n, …]``,
        the step, and ``k``.
        """

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
                acted = self._acted(named, scale, rows, recurrent_state, ended, noise[t])
                return acted.actions, acted.recurrent_state

            return each_shard(one, len(rows), owned, rows, recurrent_state, ended, noise)

        return jax.jit(act, compiler_options=COMPILER_OPTIONS)

    @cached_property
    def most_likely(self) -> Callable[[Named, Scale | None, ArrayLike, Array, ArrayLike, Array], Inferred]:
        """Returns the most likely actions, squashed; takes the arguments of :attr:`act` except noise and step."""
        net = self.program.net

        def act(
            named: Named, scale: Scale | None, rows: Array, recurrent_state: Array, ended: Array, owned: Array
        ) -> Inferred:
            def one(rows: Array, recurrent_state: Array, ended: Array) -> Inferred:
                zeros = jnp.zeros((len(rows), net.action.outputs))
                acted = self._acted(named, scale, rows, recurrent_state, ended, zeros)
                return distributions.squash(net, distributions.mode(net, acted.outputs)), acted.recurrent_state

            return each_shard(one, len(rows), owned, rows, recurrent_state, ended)

        return jax.jit(act, compiler_options=COMPILER_OPTIONS)

    @cached_property
    def noise(self) -> Callable[[Array, Array, Array], Array]:
        """Draws action noise, float32 ``[k, T, rows, …]``; takes the iteration, shards ``[k]``, and ``k``."""

        def noise(iteration: Array, shards: Array, owned: Array) -> Array:
            key = self.program.keys["action"]

            def one(shard: Array) -> Array:
                return action_noise(self.program.config, self.program.net, key, iteration, shard)

            return each_shard(one, len(shards), owned, shards)

        return jax.jit(noise)
