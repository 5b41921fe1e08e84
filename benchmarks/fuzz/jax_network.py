"""A network of one's own for engine jax: see :mod:`benchmarks.fuzz.torch_network`."""

from __future__ import annotations

import equinox as eqx
import jax
from jax import numpy as jnp


class Own(eqx.Module):
    """One hidden layer; ``dropout``, ``normalizes`` (a LayerNorm) and ``low`` (bfloat16) as the config wants them."""

    body: eqx.nn.Linear
    norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear
    low: bool = eqx.field(static=True)

    def __init__(
        self,
        observation: jax.Array,
        outputs: int,
        *,
        key: jax.Array,
        dropout: float = 0.0,
        normalizes: bool = False,
        low: bool = False,
    ) -> None:
        body, actor, critic = jax.random.split(key, 3)
        self.body = eqx.nn.Linear(observation[0].size, 16, key=body)
        self.norm = eqx.nn.LayerNorm(16) if normalizes else None
        self.dropout = eqx.nn.Dropout(dropout)
        self.low = low
        self.actor, self.critic = eqx.nn.Linear(16, outputs, key=actor), eqx.nn.Linear(16, 1, key=critic)

    def __call__(self, observation: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype = jnp.bfloat16 if self.low else jnp.float32
        body, norm = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, (self.body, self.norm))
        features = jax.vmap(body)(observation.reshape(len(observation), -1).astype(dtype))
        features = features if norm is None else jax.vmap(norm)(features)
        features = self.dropout(jax.nn.gelu(features), key=key).astype(jnp.float32)
        return jax.vmap(self.actor)(features), jax.vmap(self.critic)(features)
