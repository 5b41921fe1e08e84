"""The gradient of one block's part of a minibatch."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config import Config
from lockstep.jax_engine import distributions, nets
from lockstep.jax_engine.losses import LossSettings, loss_and_terms
from lockstep.jax_engine.nets import Parameters, PolicyNet
from lockstep.jax_engine.parameters import Named


def loss_settings(config: Config, count: int | Array = 1) -> LossSettings:
    """The loss's coefficients; ``count`` samples of the global minibatch."""
    return LossSettings(
        clip_range=config.ppo.clip_range,
        value_clip_range=config.ppo.value_clip_range,
        entropy_coef=config.ppo.entropy_coef,
        value_coef=config.ppo.value_coef,
        count=count,
        kl_coef=config.grpo.kl_coef if config.algorithm == "grpo" else 0.0,
    )


def minibatch_loss(
    net: PolicyNet, parameters: Parameters, columns: Mapping[str, Array], settings: LossSettings, key: Array | None
) -> tuple[Array, Array]:
    """Loss ``[]`` and terms ``[T]`` of columns ``[units, …]``; see :class:`lockstep.jax_engine.batch.Batch`."""
    rows, actions = columns["observations"], columns["actions"]
    if net.core is None:
        output, values = nets.actor_critic(net, parameters, rows, key)
    else:  # sequences [units, L, …] run along L
        rows, actions = jnp.moveaxis(rows, 1, 0), jnp.moveaxis(actions, 1, 0)
        output, values, _ = nets.unroll(net, parameters, rows, columns["carry"], jnp.moveaxis(columns["resets"], 1, 0))
    log_prob, entropy = distributions.log_prob_and_entropy(net, parameters, output, actions)

    def shaped(name: str) -> Array | None:
        column = columns.get(name)
        return column if column is None or net.core is None else jnp.moveaxis(column, 1, 0)

    flat = {name: None if (x := shaped(name)) is None else x.reshape(-1) for name in _COLUMNS}
    old, advantages = flat["log_probs"], flat["advantages"]
    assert old is not None
    assert advantages is not None
    return loss_and_terms(
        log_prob.reshape(-1),
        entropy.reshape(-1),
        None if values is None else values.reshape(-1),
        old,
        flat["values"],
        advantages,
        flat["returns"],
        settings,
        flat["valid"],
        flat["reference_log_probs"],
    )


_COLUMNS = ("log_probs", "advantages", "values", "returns", "valid", "reference_log_probs")


def block_gradient(
    net: PolicyNet, parameters: Named, columns: Mapping[str, Array], count: Array, config: Config, key: Array | None
) -> tuple[Named, Array]:
    """Gradient by name and loss terms ``[T]`` of one block, in as many parts as ``ppo.gradient_accumulation`` says.

    Args:
        net: the networks.
        parameters: whole, by name.
        columns: of the block's minibatch, ``[units, …]``.
        count: valid samples of the global minibatch.
        config: the run's.
        key: of dropout; None: there is none.
    """
    settings, parts = loss_settings(config, count), config.ppo.gradient_accumulation

    def one(columns: Mapping[str, Array], key: Array | None) -> tuple[Named, Array]:
        def loss(parameters: Named) -> tuple[Array, Array]:
            return minibatch_loss(net, parameters, columns, settings, key)

        return jax.grad(loss, has_aux=True)(parameters)

    if parts == 1:
        return one(columns, key)
    cut = {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in columns.items()}
    keys = None if key is None else jax.random.split(key, parts)
    zeros = jax.tree.map(jnp.zeros_like, (parameters, jnp.zeros(len(settings.terms))))
    return lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, one(*part)), None), zeros, (cut, keys))[0]
