"""Activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import Array
from jax import numpy as jnp

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
"""By name, of arrays of any shape."""
