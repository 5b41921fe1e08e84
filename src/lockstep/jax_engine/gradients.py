"""Computes the gradient of a block's samples of a minibatch, part by part."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.losses import loss_and_terms
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.chunks import equal_chunks, most_images
from lockstep.jax_engine.nets.nets import Parameters, PolicyNet
from lockstep.jax_engine.nets.parameters import Named
from lockstep.training.losses import LossSettings


def minibatch_loss(
    net: PolicyNet,
    parameters: Parameters,
    columns: Mapping[str, Array],
    settings: LossSettings,
    key: Array | None,
    most_rows: int | None = None,
) -> tuple[Array, Array]:
    """Computes loss ``[]`` and terms ``[T]`` of columns ``[units, …]``; see :class:`lockstep.jax_engine.batch.Batch`.

    ``most_rows`` is that of :func:`.nets.unroll`.
    """
    rows, actions = columns["observations"], columns["actions"]
    if net.core is None:
        output, values = nets.actor_critic(net, parameters, rows, key)
    else:  # sequences [units, L, …] run along L
        rows, actions = jnp.moveaxis(rows, 1, 0), jnp.moveaxis(actions, 1, 0)
        resets = jnp.moveaxis(columns["resets"], 1, 0)
        output, values, _ = nets.unroll(net, parameters, rows, columns["recurrent_state"], resets, most_rows=most_rows)
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
        output.reshape(-1, output.shape[-1]) if settings.loss is not None else None,
    )


_COLUMNS = ("log_probs", "advantages", "values", "returns", "valid", "reference_log_probs")


def gradient_parts(net: PolicyNet, config: Config, rows: int, platform: str) -> int:
    """Returns the number of parts in which the gradient of a block's ``rows`` samples is computed, one after the other.

    It is ``ppo.gradient_accumulation``. On a CPU, feed-forward networks take a multiple of it, so that activations stay
    in the cache. It depends on nothing but the shape of a block and the mesh's ``platform``.
    """
    parts = config.ppo.gradient_accumulation
    return parts if net.core is not None else parts * equal_chunks(net, platform, rows // parts)


def part_gradient(
    net: PolicyNet,
    parameters: Named,
    columns: Mapping[str, Array],
    settings: LossSettings,
    key: Array | None,
    platform: str,
) -> tuple[Named, Array]:
    """Computes gradient by name and loss terms ``[T]`` of one part of a block, from its columns ``[units, …]``.

    ``key`` is for dropout; None: there is none. ``platform`` is the mesh's.
    """
    most_rows = most_images(net, platform)

    def loss(parameters: Named) -> tuple[Array, Array]:
        return minibatch_loss(net, parameters, columns, settings, key, most_rows)

    return jax.grad(loss, has_aux=True)(parameters)
