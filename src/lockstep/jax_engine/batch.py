"""Turns a rollout into what the update trains on: values, log-probabilities, advantages and returns of each block."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import gae
from lockstep.jax_engine.groups import group_columns
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.chunks import in_chunks, most_images
from lockstep.jax_engine.nets.nets import Parameters, PolicyNet
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.normalizers import Scale, scaled_rewards


class Batch(NamedTuple):
    """Holds a block's samples, each array ``[units, …]``.

    A unit is a sample, or with a recurrent policy a sequence of ``L`` steps ``[L, …]``.

    Attributes:
        observations: rows.
        actions: in the form of :func:`lockstep.jax_engine.nets.distributions.sample`.
        log_probs: of the actions, before the update.
        advantages: not normalised over minibatches yet.
        values: before the update; ``returns`` are the critic's targets. Both are None without a critic.
        valid: 1.0 where a sample counts; None if all count.
        reference_log_probs: of the actions, under the reference policy.
        recurrent_state: of a recurrent policy before each sequence, ``[units, state_size]``.
        resets: 1.0 where an episode begins within a sequence.
    """

    observations: Array
    actions: Array
    log_probs: Array
    advantages: Array
    values: Array | None = None
    returns: Array | None = None
    valid: Array | None = None
    reference_log_probs: Array | None = None
    recurrent_state: Array | None = None
    resets: Array | None = None

    def columns(self) -> dict[str, Array]:
        """Returns the arrays that are not None, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


class PolicyOutputs(NamedTuple):
    """What the networks compute for a rollout.

    Attributes:
        log_probs: of the actions, float32 ``[T, n]``.
        values: of all observations, the last one included, ``[T+1, n]``; None without a critic.
        recurrent_states: after each step ``[T+1, n, state_size]``; None without a recurrent core.
    """

    log_probs: Array
    values: Array | None
    recurrent_states: Array | None = None


def begins(rollout: Rollout) -> Array:
    """Returns 1.0 where an observation begins an episode within the rollout, else 0.0, ``[T+1, n]``."""
    done = rollout.done.astype(jnp.float32)
    return jnp.concatenate([jnp.zeros_like(done[:1]), done])


def policy_outputs(
    net: PolicyNet, parameters: Parameters, rollout: Rollout, acted: Array | None, platform: str
) -> PolicyOutputs:
    """Computes log-probabilities and values of a rollout ``[T, n, …]``.

    ``acted`` are the actor's outputs if they are known, else None; ``platform`` is the mesh's.
    """
    (steps, n), rows = rollout.rewards.shape, rollout.observations
    if net.core is not None:
        first, values, recurrent_states = nets.unroll(
            net, parameters, rows, rollout.recurrent_state, begins(rollout), most_rows=most_images(net, platform)
        )
        known = first[:-1] if acted is None else acted
        log_probs = distributions.log_prob_and_entropy(net, parameters, known, rollout.actions)[0]
        return PolicyOutputs(log_probs, values, recurrent_states)
    flat, most = rows.reshape((steps + 1) * n, -1), most_images(net, platform)
    if acted is None and most is not None:  # one pass, so that actor and critic can share the convolutions
        both = in_chunks(partial(nets.actor_critic, net, parameters), flat, most)
        acted, values = both[0][: steps * n].reshape(steps, n, -1), both[1]
    else:
        values = _values(net, parameters, flat, platform) if net.critic else None
    if acted is None:
        acted = nets.actor(net, parameters, flat[: steps * n]).reshape(steps, n, -1)
    values = None if values is None else values.reshape(steps + 1, n)
    return PolicyOutputs(distributions.log_prob_and_entropy(net, parameters, acted, rollout.actions)[0], values)


def _values(net: PolicyNet, parameters: Parameters, rows: Array, platform: str) -> Array:
    """Computes values ``[n]`` of rows ``[n, width]``, images in chunks."""
    return in_chunks(partial(nets.critic, net, parameters), rows, most_images(net, platform))


def bootstrap_values(
    net: PolicyNet, parameters: Parameters, rollout: Rollout, outputs: PolicyOutputs, platform: str
) -> Array:
    """Computes V of what followed each step, ``[T, n]``; of the final observation where an episode was truncated."""
    assert outputs.values is not None
    steps, n = rollout.rewards.shape

    def of_finals() -> Array:
        rows = rollout.final.reshape(steps * n, -1)
        if net.core is None:
            return _values(net, parameters, rows, platform).reshape(steps, n)
        assert outputs.recurrent_states is not None
        recurrent_state = outputs.recurrent_states[:-1].reshape(steps * n, -1)
        none, most = jnp.zeros((1, steps * n)), most_images(net, platform)
        values = nets.unroll(net, parameters, rows[None], recurrent_state, none, most_rows=most)[1]
        assert values is not None
        return values[0].reshape(steps, n)

    finals = lax.cond(rollout.truncated.any(), of_finals, lambda: jnp.zeros((steps, n)))
    return jnp.where(rollout.truncated, finals, outputs.values[1:])


def to_units(x: Array, length: int | None) -> Array:
    """Reshapes ``[T, n, …]`` to samples ``[T·n, …]``, or to sequences of one environment each, ``[T/L·n, L, …]``.

    ``length`` is L; None for samples.
    """
    steps, n = x.shape[:2]
    if length is None:
        return x.reshape(steps * n, *x.shape[2:])
    parts = x.reshape(steps // length, length, n, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 2).reshape(steps // length * n, length, *x.shape[2:])


def make_batch(
    net: PolicyNet,
    parameters: Parameters,
    reference: Parameters | None,
    rollout: Rollout,
    config: Config,
    scale: Scale | None,
    platform: str,
) -> tuple[Batch, Array]:
    """Computes values, log-probabilities, advantages and returns of a block's rollout ``[T, n, …]``.

    ``reference`` are the parameters of GRPO's reference policy, or None; ``scale`` scales rewards, or None;
    ``platform`` is the mesh's.

    Returns:
        The batch, and the recurrent state before the next rollout ``[n, state_size]``: zeros where an episode begins.
    """
    length = config.sequence_length
    outputs = policy_outputs(net, parameters, rollout, rollout.outputs, platform)
    columns: dict[str, Array] = {
        "observations": rollout.observations[:-1],
        "actions": rollout.actions,
        "log_probs": outputs.log_probs,
    }
    if config.algorithm == "grpo":
        columns |= group_columns(rollout, config)
        if reference is not None:
            columns["reference_log_probs"] = policy_outputs(net, reference, rollout, None, platform).log_probs
    else:
        assert outputs.values is not None
        rewards = scaled_rewards(rollout.rewards, scale, config.normalize.clip_rewards)
        following = bootstrap_values(net, parameters, rollout, outputs, platform)
        columns["values"] = values = outputs.values[:-1]
        columns["advantages"], columns["returns"] = gae(
            rewards, values, following, rollout.terminated, rollout.done, config.ppo.gamma, config.ppo.gae_lambda
        )
    recurrent_state, after = None, rollout.recurrent_state
    if outputs.recurrent_states is not None:
        columns["resets"] = begins(rollout)[:-1]
        first, ends = rollout.recurrent_state[None], slice(length - 1, config.num_steps - 1, length)
        into = jnp.concatenate([first, outputs.recurrent_states[ends]])
        recurrent_state = into.reshape(-1, into.shape[-1])
        after = jnp.where(rollout.done[-1][:, None], 0.0, outputs.recurrent_states[-2])
    laid = {name: to_units(x, None if net.core is None else length) for name, x in columns.items()}
    batch = Batch(**laid, recurrent_state=recurrent_state)
    return batch, after
