"""A network of one's own for engine jax: see :mod:`benchmarks.fuzz.torch_network`."""

from __future__ import annotations

import equinox as eqx
import jax


class Own(eqx.Module):
    """One hidden layer; ``dropout`` and ``normalizes`` (a LayerNorm) as the config wants them."""

    body: eqx.nn.Linear
    norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear

    def __init__(
        self, observation: jax.Array, outputs: int, *, key: jax.Array, dropout: float = 0.0, normalizes: bool = False
    ) -> None:
        body, actor, critic = jax.random.split(key, 3)
        self.body = eqx.nn.Linear(observation[0].size, 16, key=body)
        self.norm = eqx.nn.LayerNorm(16) if normalizes else None
        self.dropout = eqx.nn.Dropout(dropout)
        self.actor, self.critic = eqx.nn.Linear(16, outputs, key=actor), eqx.nn.Linear(16, 1, key=critic)

    def __call__(self, observation: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        features = jax.vmap(self.body)(observation.reshape(len(observation), -1))
        features = features if self.norm is None else jax.vmap(self.norm)(features)
        features = self.dropout(jax.nn.gelu(features), key=key)
        return jax.vmap(self.actor)(features), jax.vmap(self.critic)(features)
