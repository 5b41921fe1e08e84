"""The policy by itself, on one device of this process, shard by shard: for environments that are not in the program."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.distributed.placement import first_copy, gathered
from lockstep.jax_engine.nets import distributions
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Actor, action_noise
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.normalizers import normalized, scale_of
from lockstep.jax_engine.state import TrainState


class Inference:
    """Compiled functions of a program's networks.

    Args:
        program: of which networks and settings are taken.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def local_parameters(self, state: TrainState) -> Any:
        """Whole parameters by name on this process's first device."""
        if self.program.layout.axes:
            return {name: jnp.asarray(gathered(x)) for name, x in state.parameters.items()}
        return self._split(first_copy(state.parameters))

    @cached_property
    def _split(self) -> Any:
        return jax.jit(self.program.layout.split)

    def local_scale(self, state: TrainState) -> Any:
        """Mean and scale of observations on this process's first device, or None."""
        if state.observations is None:
            return None
        return self._scale(jax.tree.map(first_copy, state.observations))

    @cached_property
    def _scale(self) -> Any:
        return jax.jit(scale_of)

    @cached_property
    def act(self) -> Any:
        """The policy on one device, for some shards of this process, whose environments are on the host.

        Takes parameters, the scale of observations (or None), rows ``[k, n, width]`` as environments gave them, what a
        recurrent policy carries, where an episode just ended, noise ``[k, T, n, …]``, the step, and ``k``.
        """
        net, clip = self.program.net, self.program.config.normalize.clip_observations

        def act(
            named: Any, scale: Any, rows: Array, memory: Array, ended: Array, noise: Array, t: Array, owned: Array
        ) -> Any:
            def one(rows: Array, memory: Array, ended: Array, noise: Array) -> Any:
                seen = normalized(net.observation, rows, scale, clip)
                kept = jnp.where(ended[:, None], 0.0, memory)
                actions, _, memory = Actor(net, named)(seen, kept, noise[t])
                return actions, memory

            return each_shard(one, len(rows), owned, rows, memory, ended, noise)

        return jax.jit(act)

    @cached_property
    def most_likely(self) -> Any:
        """:meth:`act`'s program without noise and step: the most likely actions, squashed."""
        net, clip = self.program.net, self.program.config.normalize.clip_observations

        def act(named: Any, scale: Any, rows: Array, memory: Array, ended: Array, owned: Array) -> Any:
            def one(rows: Array, memory: Array, ended: Array) -> Any:
                seen = normalized(net.observation, rows, scale, clip)
                zeros = jnp.zeros((len(rows), net.action.outputs))
                kept = jnp.where(ended[:, None], 0.0, memory)
                _, output, memory = Actor(net, named)(seen, kept, zeros)
                return distributions.squash(net, distributions.mode(net, output)), memory

            return each_shard(one, len(rows), owned, rows, memory, ended)

        return jax.jit(act)

    @cached_property
    def noise(self) -> Any:
        """Action noise of some shards: iteration, shards ``[k]`` and their number to float32 ``[k, T, rows, …]``."""

        def noise(iteration: Array, shards: Array, owned: Array) -> Array:
            key = self.program.keys["action"]
            return each_shard(
                lambda shard: action_noise(self.program.config, self.program.net, key, iteration, shard),
                len(shards),
                owned,
                shards,
            )

        return jax.jit(noise)
