"""Networks that a user of the JAX engine might bring, good ones and others."""

import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jax import numpy as jnp


class Tiny(eqx.Module):
    """One hidden layer, with dropout and a critic if wanted."""

    body: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear | None

    def __init__(self, observation, outputs, *, key, units=8, dropout=0.0, critic=True):
        body, actor, value = jax.random.split(key, 3)
        self.body = [eqx.nn.Linear(observation.shape[-1], units, key=body)]
        self.dropout = eqx.nn.Dropout(dropout)
        self.actor = eqx.nn.Linear(units, outputs, key=actor)
        self.critic = eqx.nn.Linear(units, 1, key=value) if critic else None

    def __call__(self, observation, *, key):
        features = jax.nn.tanh(jax.vmap(self.body[0])(observation))
        features = self.dropout(features, key=key)
        output = jax.vmap(self.actor)(features)
        return output if self.critic is None else (output, jax.vmap(self.critic)(features))


class Taking(Tiny):
    """Takes out of its arguments what it is told."""

    def __init__(self, observation, outputs, *, key, options):
        super().__init__(observation, outputs, key=key, units=options.pop("units"))


class WideHead(Tiny):
    """Computes its heads in float32 at any precision, as docs/networks.md has it."""

    def __call__(self, observation, *, key):
        features = jax.nn.tanh(jax.vmap(self.body[0])(observation)).astype(jnp.float32)
        assert self.critic is not None
        return jax.vmap(self.actor)(features), jax.vmap(self.critic)(features)


class OfParts(eqx.Module):
    """Takes the parts of a Dict by name; a table of integers is no parameter."""

    colours: Array
    head: eqx.nn.Linear
    table: Array

    def __init__(self, observation, outputs, *, key):
        first, second = jax.random.split(key)
        self.colours = jax.random.normal(first, (6, 4))
        self.head = eqx.nn.Linear(4 + observation["arm/1"][0].size + 1, outputs + 1, key=second)
        self.table = jnp.arange(6)

    def __call__(self, observation, *, key):
        assert observation["eye"].dtype == jnp.uint8
        rows = len(observation["arm/0"])
        colour = self.colours[self.table[observation["arm/0"]]]
        bright = observation["eye"].reshape(rows, -1).mean(-1, keepdims=True) / 255
        out = jax.vmap(self.head)(jnp.concatenate([colour, observation["arm/1"].reshape(rows, -1), bright], -1))
        return out[:, :-1], out[:, -1]


class Statistical(Tiny):
    """Keeps running statistics."""

    norm: eqx.nn.BatchNorm

    def __init__(self, observation, outputs, *, key):
        super().__init__(observation, outputs, key=key)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")


class Narrow(Tiny):
    """Has one output too few."""

    def __init__(self, observation, outputs, *, key):
        super().__init__(observation, outputs - 1, key=key)


class Broken(eqx.Module):
    """Can't be called."""

    layer: eqx.nn.Linear

    def __init__(self, observation, outputs, *, key):
        self.layer = eqx.nn.Linear(3, outputs, key=key)

    def __call__(self, observation, *, key):
        return jax.vmap(self.layer)(observation)


class Plain:
    """Is no module of Equinox."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class RandomSigns(Tiny):
    """Draws integers too, which are no parameters."""

    signs: Array

    def __init__(self, observation, outputs, *, key):
        super().__init__(observation, outputs, key=key)
        self.signs = jax.random.randint(key, (8,), 0, 1 << 20)


class Jittery(Tiny):
    """Draws from a generator of the host."""

    def __call__(self, observation, *, key):
        return super().__call__(observation + np.random.rand(), key=key)


class Features(Tiny):
    """Is made with numbers of a generator of the host: a parameter, a constant, or in its program."""

    basis: Any

    def __init__(self, observation, outputs, *, key, where="parameter", keyed=False):
        super().__init__(observation, outputs, key=key)
        size = (observation.shape[-1],)
        drawn = jax.random.normal(key, size) if keyed else jnp.asarray(np.random.default_rng().normal(size=size))
        self.basis = {"parameter": drawn, "constant": (1000 * drawn).astype(jnp.int32), "program": None}[where]

    def __call__(self, observation, *, key):
        basis = np.random.default_rng().normal() if self.basis is None else self.basis
        return super().__call__(jnp.cos(observation + basis), key=key)


class Activated(Tiny):
    """Sets a function of its own, which is another object each time."""

    activation: Any

    def __init__(self, observation, outputs, *, key, kind="lambda"):
        super().__init__(observation, outputs, key=key)
        slope = {"lambda": 2.0, "partial": 2.0}.get(kind) or jax.random.normal(key, ())

        def itself(x):
            return slope * x if x.ndim else itself(x)

        plain = itself if kind == "itself" else lambda x, slope=slope: slope * x
        self.activation = functools.partial(plain, slope=3.0) if kind == "partial" else plain

    def __call__(self, observation, *, key):
        return super().__call__(self.activation(observation), key=key)


class JitteryInTraining(Tiny):
    """Draws from a generator of the host where it has a key."""

    def __call__(self, observation, *, key):
        return super().__call__(observation if key is None else observation + np.random.rand(), key=key)


class Untrainable(Tiny):
    """Can't be called in training."""

    def __call__(self, observation, *, key):
        return super().__call__(observation if key is None else observation.noisy(), key=key)


class Imprecise(Tiny):
    """Keeps a factor in another type."""

    scale: Array | np.ndarray

    def __init__(self, observation, outputs, *, key, dtype="bfloat16"):
        super().__init__(observation, outputs, key=key)
        self.scale = np.ones(outputs, jnp.dtype(dtype))

    def __call__(self, observation, *, key):
        output, values = super().__call__(observation, key=key)
        return output * self.scale, values


class Forbidding(Tiny):
    """Forbids the last action by a logit of its own, by default -inf."""

    logit: float = eqx.field(static=True)

    def __init__(self, observation, outputs, *, key, logit=float("-inf")):
        super().__init__(observation, outputs, key=key)
        self.logit = float(logit)

    def __call__(self, observation, *, key):
        output, values = super().__call__(observation, key=key)
        return jnp.concatenate([output[:, :-1], jnp.full_like(output[:, -1:], self.logit)], -1), values


class Returning(Tiny):
    """Returns its outputs and values as a list, or something else that the arguments name."""

    kind: str = eqx.field(static=True)

    def __init__(self, observation, outputs, *, key, kind="list"):
        super().__init__(observation, outputs, key=key)
        self.kind = kind

    def __call__(self, observation, *, key):
        output, values = super().__call__(observation, key=key)
        kinds: dict[str, Any] = {"list": [output, values], "three": (output, values, 1), "no values": (output, None)}
        kinds |= {"dict": {"output": output}, "nothing": None, "one": (output,), "text": (output, "values")}
        return kinds[self.kind]


class Keyless(Tiny):
    """Can't be called with a key."""

    def __call__(self, observation):
        return super().__call__(observation, key=None)


class Squeezed(Tiny):
    """Drops axes of one, also that of a single observation."""

    def __call__(self, observation, *, key):
        output, values = super().__call__(observation, key=key)
        return output.squeeze(), values.squeeze()
