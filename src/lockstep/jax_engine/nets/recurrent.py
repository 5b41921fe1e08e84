"""Recurrent cores: LSTM (Hochreiter & Schmidhuber 1997) and GRU (Cho et al. 2014), with gates in PyTorch's order."""

from __future__ import annotations

import equinox as eqx
import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.nets.layers import Linear, named, product


class LSTM(eqx.Module):
    """An LSTM whose state is hidden and cell state, float32 ``[n, 2 · size]``; both weights have ``4 · size`` rows."""

    inputs: Linear
    hidden: Array

    def step(self, projected: Array, recurrent_state: Array) -> tuple[Array, Array]:
        """Computes hidden state ``[n, size]`` and recurrent state from projected inputs ``[n, 4 · size]``."""
        hidden, cell = jnp.split(recurrent_state, 2, -1)
        gates = projected + product(hidden, self.hidden)
        i, f, g, o = jnp.split(gates, 4, -1)
        cell = lax.logistic(f) * cell + lax.logistic(i) * jnp.tanh(g)
        hidden = lax.logistic(o) * jnp.tanh(cell)
        return hidden, jnp.concatenate([hidden, cell], -1)


class GRU(eqx.Module):
    """A GRU whose state is the hidden state, float32 ``[n, size]``; the reset gate also multiplies the hidden bias."""

    inputs: Linear
    hidden: Linear

    def step(self, projected: Array, recurrent_state: Array) -> tuple[Array, Array]:
        """Computes hidden state ``[n, size]`` and recurrent state from projected inputs ``[n, 3 · size]``."""
        r, z, n = jnp.split(projected, 3, -1)
        hr, hz, hn = jnp.split(self.hidden(recurrent_state), 3, -1)
        reset, update = lax.logistic(r + hr), lax.logistic(z + hz)
        new = jnp.tanh(n + reset * hn)
        hidden = new + update * (recurrent_state - new)
        return hidden, hidden


def named_core(core: str, trunk: str) -> LSTM | GRU:
    """Makes a core with the names of its parameters in place of arrays."""
    name = f"{trunk}.core"
    if core == "gru":
        return GRU(named(Linear, f"{name}.input"), named(Linear, f"{name}.hidden"))
    make = LSTM  # names stand where arrays will
    return make(named(Linear, f"{name}.input"), f"{name}.hidden.weight")  # pyright: ignore[reportArgumentType]


def unroll(
    core: LSTM | GRU, x: Array, recurrent_state: Array, resets: Array, remat: bool = False
) -> tuple[Array, Array]:
    """Runs a core over inputs ``[steps, n, inputs]``, from a recurrent state ``[n, state_size]``.

    ``resets`` ``[steps, n]`` is true (or 1.0) where the recurrent state is 0 before a step. With ``remat`` each step's
    inner activations are recomputed for its gradient instead of stored.

    Returns:
        Hidden states ``[steps, n, size]`` and the recurrent state after each step ``[steps, n, state_size]``.
    """

    def step(recurrent_state: Array, now: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        projected, fresh = now
        hidden, recurrent_state = core.step(projected, jnp.where(fresh[:, None], 0.0, recurrent_state))
        return recurrent_state, (hidden, recurrent_state)

    recurrent_state = recurrent_state.astype(jnp.float32)  # a weak type would become bfloat16 beside it
    _, out = lax.scan(jax.checkpoint(step) if remat else step, recurrent_state, (core.inputs(x), resets > 0))
    return out
