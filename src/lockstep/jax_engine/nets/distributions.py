"""Distributions of actions, given by an actor's output: categorical, several categoricals, or a diagonal Gaussian.

Noise is drawn beforehand, so that sampling is a pure function. The largest of logits plus Gumbel noise is a sample of a
categorical; mean plus standard deviation times normal noise is one of a Gaussian. A squashed Gaussian keeps the number
before the tanh as its action; :func:`squash` converts it to the environment's action.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.nets.encoders import action_mask
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.networks.spec import LOG_STD_LIMITS, MASKED_LOGIT

LOG_TWO_PI = math.log(2.0 * math.pi)


def mean_and_log_std(net: PolicyNet, parameters: Mapping[str, Array], output: Array) -> tuple[Array, Array]:
    """Splits a Gaussian's output into mean ``[…, A]`` and log standard deviation, which broadcasts with it."""
    if net.state_dependent_std:
        mean, log_std = jnp.split(output, 2, -1)
        return mean, jnp.clip(log_std, *LOG_STD_LIMITS)
    return output, parameters["log_std"]


def sample(net: PolicyNet, parameters: Mapping[str, Array], output: Array, noise: Array) -> Array:
    """Samples actions from the actor's output ``[rows, outputs]`` and noise drawn before ``[rows, action outputs]``.

    Noise is Gumbel (discrete) or standard normal. Actions are int32 ``[rows]`` or ``[rows, indices]``, or float32
    ``[rows, A]``.
    """
    if net.discrete:
        return mode(net, output + noise)
    mean, log_std = mean_and_log_std(net, parameters, output)
    return mean + jnp.exp(log_std) * noise


def mode(net: PolicyNet, output: Array) -> Array:
    """Returns the most likely actions, shaped as :func:`sample`'s."""
    if net.action.kind == "discrete":
        return lax.argmax(output, output.ndim - 1, jnp.int32)
    if net.action.kind == "multi_discrete":
        return jnp.stack([lax.argmax(part, part.ndim - 1, jnp.int32) for part in _parts(net, output)], -1)
    return output[..., : net.action.outputs]


def _parts(net: PolicyNet, output: Array) -> list[Array]:
    """Splits the output into the logits of each index."""
    return jnp.split(output, list(itertools.accumulate(net.action.choices))[:-1], -1)


def log_prob_and_entropy(
    net: PolicyNet, parameters: Mapping[str, Array], output: Array, actions: Array
) -> tuple[Array, Array]:
    """Computes log-probability and entropy, each ``[…]``, of actions shaped as :func:`sample`'s.

    A squashed Gaussian has no entropy in closed form. It is computed as the Gaussian's plus the mean log slope of the
    tanh, estimated at these actions as a function of mean and standard deviation. (Minus the log-probability would have
    the same mean, but a gradient that is 0 on average.)
    """
    if net.action.kind == "discrete":
        return _categorical(output, actions)
    if net.action.kind == "multi_discrete":
        both = [_categorical(part, actions[..., n]) for n, part in enumerate(_parts(net, output))]
        return sum_in_order([x for x, _ in both]), sum_in_order([x for _, x in both])
    mean, log_std = mean_and_log_std(net, parameters, output)
    z = (actions - mean) * jnp.exp(-log_std)
    log_prob = (-0.5 * z * z - log_std - 0.5 * LOG_TWO_PI).sum(-1)
    entropy = (log_std + 0.5 * (1.0 + LOG_TWO_PI)).sum(-1)
    if net.squashed:
        moved = mean + jnp.exp(log_std) * lax.stop_gradient(z)
        return log_prob - _log_slope(actions).sum(-1), entropy + _log_slope(moved).sum(-1)
    return log_prob, jnp.broadcast_to(entropy, log_prob.shape)


def _categorical(logits: Array, actions: Array) -> tuple[Array, Array]:
    log_probs = jax.nn.log_softmax(logits, -1)
    # A sum with one term that isn't 0, because a gather's gradient would be a slow scatter.
    taken = actions[..., None] == jnp.arange(logits.shape[-1], dtype=actions.dtype)
    chosen = jnp.where(taken, log_probs, 0.0).sum(-1)
    return chosen, -(jnp.exp(log_probs) * log_probs).sum(-1)


def sum_in_order(parts: list[Array]) -> Array:
    """Adds arrays, first to last."""
    return functools.reduce(operator.add, parts)


def _log_slope(x: Array) -> Array:
    """Computes log tanh'(x), ``2 (log 2 - |x| - log(1 + exp(-2|x|)))`` (Haarnoja et al. 2018, appendix C)."""
    size = jnp.abs(x)
    return 2.0 * (math.log(2.0) - size - jnp.log(1.0 + jnp.exp(-2.0 * size)))


def squash(net: PolicyNet, actions: Array) -> Array:
    """Squashes a squashed Gaussian's actions ``[…, A]`` into the bounds; returns other actions unchanged."""
    if not net.squashed:
        return actions
    low, high = (jnp.asarray(bound, jnp.float32) for bound in (net.action.low, net.action.high))
    return low + (high - low) * 0.5 * (jnp.tanh(actions) + 1.0)


def action_noise(net: PolicyNet, key: Array, shape: tuple[int, ...]) -> Array:
    """Draws the noise of actions, float32: Gumbel for discrete ones, standard normal for continuous ones."""
    if net.discrete:
        return jax.random.gumbel(key, shape, jnp.float32, mode="low")  # else JAX's setting decides it
    return jax.random.normal(key, shape, jnp.float32)


def random_actions(net: PolicyNet, rows: Array, key: Array) -> Array:
    """Draws random actions ``[n, …]``: uniform over allowed choices or within bounds, else normal."""
    layout = net.action
    if layout.discrete:
        noise = action_noise(net, key, (len(rows), layout.outputs))
        mask = action_mask(net.observation, rows)
        return mode(net, noise if mask is None else jnp.where(mask, noise, MASKED_LOGIT))
    low, high = (np.asarray(bound, np.float32) for bound in (layout.low, layout.high))
    bounded = layout.within
    least, most = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)
    uniform = jax.random.uniform(key, (len(rows), low.size), jnp.float32)
    normal = jax.random.normal(jax.random.fold_in(key, 1), (len(rows), low.size), jnp.float32)
    return jnp.where(bounded, least + (most - least) * uniform, normal)
