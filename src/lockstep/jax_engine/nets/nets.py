"""Actor and critic networks as functions of named parameters: Equinox modules on the rows of one shard.

Parameters are a dict by name, as a checkpoint holds them (:mod:`lockstep.networks.spec`), and gradients are taken of
that dict. For a pass the arrays are put into a skeleton: the tree of modules with names where arrays belong, made once
per net. For several shards these functions are called shard by shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import equinox as eqx
import jax
from jax import Array
from jax import numpy as jnp

from lockstep.jax_engine.nets import recurrent
from lockstep.jax_engine.nets.chunks import in_chunks
from lockstep.jax_engine.nets.encoders import Encoder, action_mask, named_encoder
from lockstep.jax_engine.nets.layers import MLP, named_mlp
from lockstep.networks import spec as net_shapes

Parameters = Mapping[str, Array]


@dataclass(frozen=True)
class PolicyNet(net_shapes.PolicyNet):
    """Shapes of an actor and a critic.

    With ``remat`` the backward pass recomputes activations instead of storing them.
    """

    remat: bool = False


class Body(eqx.Module):
    """A network up to its head; its hidden layers are included only if actor and critic share them."""

    encoder: Encoder
    core: recurrent.LSTM | recurrent.GRU | None
    layers: MLP | None

    def __call__(self, rows: Array) -> Array:
        """Computes features ``[n, …]`` of observation rows ``[n, width]``; for bodies without a core."""
        x = self.encoder(rows)
        return x if self.layers is None else self.layers(x)


class Networks(eqx.Module):
    """Actor and critic: the body of each or the shared one, and each one's layers after its body."""

    bodies: tuple[Body, ...]
    actor: MLP
    critic: MLP | None


@lru_cache(maxsize=64)
def _skeleton(net: PolicyNet) -> Networks:
    """Makes the modules with names where arrays belong."""

    def layers(name: str) -> MLP:
        return named_mlp(name, len(net.sizes(name)) - 1, net.activation, name == "trunk")

    bodies = tuple(
        Body(
            named_encoder(net.observation, net.image, trunk),
            recurrent.named_core(net.core, trunk) if net.core else None,
            layers(trunk) if net.shared else None,
        )
        for trunk in net.trunks
    )
    return Networks(bodies, layers("actor"), layers("critic") if net.critic else None)


def networks(net: PolicyNet, parameters: Parameters) -> Networks:
    """Makes the modules with arrays in them; in bfloat16 if the precision asks for it, except heads."""
    assert net.custom is None, "a network of the user's own is one module"
    heads = tuple(f"{name}.{len(net.sizes(name)) - 2}." for name in ("actor", "critic"))

    def array(name: str) -> Array:
        low = net.bf16 and not name.startswith(heads)
        return parameters[name].astype(jnp.bfloat16) if low else parameters[name]

    return jax.tree.map(array, _skeleton(net))


def _forward(net: PolicyNet, x: Array, *modules: Any) -> Array:
    """Applies modules one after another; with ``remat`` only the input is stored for the backward pass."""

    def run(modules: tuple[Any, ...], x: Array) -> Array:
        for module in modules:
            x = module(x)
        return x

    return (jax.checkpoint(run) if net.remat else run)(modules, x)


def _masked(net: PolicyNet, observations: Array, output: Array) -> Array:
    mask = action_mask(net.observation, observations)
    output = output.astype(jnp.float32)
    return output if mask is None else jnp.where(mask, output, net_shapes.MASKED_LOGIT)


def _value(output: Array) -> Array:
    return output[..., 0].astype(jnp.float32)


def actor(net: PolicyNet, parameters: Parameters, observations: Array, key: Array | None = None) -> Array:
    """Computes the actor's output float32 ``[n, outputs]`` of rows ``[n, width]``; forbidden logits are -1e8.

    ``key`` is for a custom network's dropout; None: none.
    """
    if net.custom is not None:
        return _custom(net, parameters, observations, key)[0]
    built = networks(net, parameters)
    return _masked(net, observations, _forward(net, observations, built.bodies[0], built.actor))


def critic(net: PolicyNet, parameters: Parameters, observations: Array, key: Array | None = None) -> Array:
    """Computes values float32 ``[n]`` of observation rows ``[n, width]``; takes the arguments of :func:`actor`."""
    if net.custom is not None:
        values = _custom(net, parameters, observations, key)[1]
        assert values is not None
        return values
    built = networks(net, parameters)
    return _value(_forward(net, observations, built.bodies[-1], built.critic))


def actor_critic(
    net: PolicyNet, parameters: Parameters, observations: Array, key: Array | None = None
) -> tuple[Array, Array | None]:
    """Computes the actor's output ``[n, outputs]`` and values ``[n]`` (None without a critic).

    Takes the arguments of :func:`actor`.
    """
    if net.custom is not None:
        return _custom(net, parameters, observations, key)
    if not net.shared:
        return actor(net, parameters, observations), critic(net, parameters, observations) if net.critic else None
    built = networks(net, parameters)
    return _heads(net, built, observations, [_forward(net, observations, built.bodies[0])])


def _custom(
    net: PolicyNet, parameters: Parameters, observations: Array, key: Array | None
) -> tuple[Array, Array | None]:
    def run(parameters: Parameters, observations: Array) -> tuple[Array, Array | None]:
        return net.custom(parameters, net.observation, observations, key, net.bf16)

    output, values = (jax.checkpoint(run) if net.remat else run)(parameters, observations)
    return _masked(net, observations, output), values if net.critic else None


def _heads(net: PolicyNet, built: Networks, observations: Array, features: list[Array]) -> tuple[Array, Array | None]:
    """Applies both heads to the features of their bodies ``[n, …]``."""
    output = _masked(net, observations, _forward(net, features[0], built.actor))
    return output, _value(_forward(net, features[-1], built.critic)) if net.critic else None


def _encoded(net: PolicyNet, encoder: Encoder, rows: Array) -> Array:
    return _forward(net, rows, encoder)


def unroll(
    net: PolicyNet,
    parameters: Parameters,
    observations: Array,
    recurrent_state: Array,
    resets: Array,
    actor_only: bool = False,
    most_rows: int | None = None,
) -> tuple[Array, Array | None, Array]:
    """Runs recurrent networks over rows ``[steps, n, width]`` from a recurrent state, float32 ``[n, state_size]``.

    ``resets`` ``[steps, n]`` is true (or 1.0) where an episode begins with a step; the recurrent state is 0 there. With
    ``actor_only`` the critic is left out, and its recurrent state doesn't change. Encoders take ``most_rows`` rows at a
    time; None: all.

    Returns:
        The actor's output ``[steps, n, outputs]``, values ``[steps, n]`` or None, and the recurrent state after each
        step ``[steps, n, state_size]``.
    """
    steps, n, _ = observations.shape
    rows, built = observations.reshape(steps * n, -1), networks(net, parameters)
    features: list[Array] = []
    recurrent_states: list[Array] = []
    for trunk, body, part in zip(
        net.trunks, built.bodies, jnp.split(recurrent_state, len(net.trunks), -1), strict=True
    ):
        if actor_only and trunk == "critic":
            recurrent_states.append(jnp.broadcast_to(part, (steps, *part.shape)))
            continue
        assert body.core is not None
        x = in_chunks(partial(_encoded, net, body.encoder), rows, most_rows).reshape(steps, n, -1)
        outputs, carried = recurrent.unroll(body.core, x, part, resets, net.remat)
        x = outputs.reshape(steps * n, -1)
        features.append(x if body.layers is None else _forward(net, x, body.layers))
        recurrent_states.append(carried)
    if actor_only:
        output, values = _masked(net, rows, _forward(net, features[0], built.actor)), None
    else:
        output, values = _heads(net, built, rows, features)
    shaped = None if values is None else values.reshape(steps, n)
    return output.reshape(steps, n, -1), shaped, jnp.concatenate(recurrent_states, -1)
