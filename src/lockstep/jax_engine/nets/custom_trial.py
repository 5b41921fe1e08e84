"""Tries whether a custom network can be trained as it is written, before anything starts."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax import numpy as jnp

from lockstep.core.user_code.errors import error_line, users_line
from lockstep.jax_engine.nets.custom import CustomNet, host_array
from lockstep.jax_engine.shards.keys import seed_key
from lockstep.networks.checks import check_outputs, other_type
from lockstep.networks.draws import host_generators, keyed_by_nothing, made_otherwise


def check_function(name: str, custom: CustomNet, net: Any) -> None:
    """Traces a user's module with a key, as in training; without one it was traced when it was made.

    Code that draws random numbers without the key draws them once, when a program is traced, and never again. Policies
    trained before this check existed can still be loaded.

    Raises:
        ValueError: if it draws such numbers, can't be called in training or with a single observation, or has
            parameters that JAX doesn't compute in float32; one line that begins with ``name``.
    """
    for parameter, dtype in custom.dtypes.items():
        if jax.dtypes.canonicalize_dtype(dtype) != jnp.float32:  # JAX computes NumPy's float64 in float32
            raise other_type(name, parameter, str(dtype), "float32", "__call__")
    before, rows = host_generators(), jnp.asarray(net.observation.zeros(2))
    try:
        jax.eval_shape(
            lambda parameters, x, key: custom(parameters, net.observation, x, key, net.bf16),
            custom.initial_parameters(),
            rows,
            seed_key(0),
        )
    except Exception as error:  # the user's own exception
        raise ValueError(f"{name}: in training: {error_line(error)}{users_line(error)}") from error
    _check_single_row(name, custom, net)
    if custom.drew or host_generators() != before:
        raise keyed_by_nothing(name, "jax.random, of the key that it is called with,")


def check_made_alike(name: str, custom: CustomNet, again: CustomNet, net: Any) -> None:
    """Compares a user's module with one that was made ``again`` under the same key, and the programs they trace to.

    Raises:
        ValueError: arrays of the modules or constants of the programs differ; one line that begins with ``name``.
    """
    others = again.arrays()
    for key, x in custom.arrays().items():
        other = others.get(key)
        if other is None or x.dtype != other.dtype or x.tobytes() != other.tobytes():
            raise made_otherwise(name, key, "jax.random and the key that it is given")
    if _traced(custom, net) != _traced(again, net):
        raise made_otherwise(name, "in what it computes", "jax.random and the key that it is given")


def _traced(custom: CustomNet, net: Any) -> tuple[str, list[bytes]]:
    """Traces what a module computes outside of training; returns the program without addresses, and its constants."""
    rows = jnp.asarray(net.observation.zeros(2))
    traced = jax.make_jaxpr(lambda parameters, x: custom(parameters, net.observation, x))(
        custom.initial_parameters(), rows
    )
    return re.sub(r"0x[0-9a-f]+", "", str(traced)), [host_array(x).tobytes() for x in traced.consts]


def _check_single_row(name: str, custom: CustomNet, net: Any) -> None:
    """Refuses a module that drops the axis of observations if there is only one; policies are called like that."""
    try:
        output, values = jax.eval_shape(
            lambda parameters, x: custom(parameters, net.observation, x),
            custom.initial_parameters(),
            jnp.asarray(net.observation.zeros(1)),
        )
    except Exception as error:  # the user's own exception
        raise ValueError(f"{name}: with a single observation: {error_line(error)}{users_line(error)}") from error
    check_outputs(name, net, output.shape, None if values is None else values.shape, 1)
