"""From a rollout to what the update trains on: values, log-probabilities, advantages and returns, block by block."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import gae, group_advantages
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.nets import Parameters, PolicyNet
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.shards.normalizers import scaled_rewards


class Batch(NamedTuple):
    """Samples of a block, each ``[units, …]``: a unit is a sample, or with a recurrent policy a sequence ``[L, …]``.

    Attributes:
        observations: rows.
        actions: as :func:`lockstep.jax_engine.nets.distributions.sample` gives them; ``log_probs`` before the update.
        log_probs: see ``actions``.
        advantages: not normalised over minibatches yet.
        values: before the update, and ``returns`` what they should be; None without a critic.
        returns: see ``values``.
        valid: 1.0 where a sample counts, None where all do.
        reference_log_probs: of the actions under the reference policy.
        carry: what a recurrent policy carries into each sequence ``[units, carry_size]``.
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
    carry: Array | None = None
    resets: Array | None = None


def columns_of(batch: Batch) -> dict[str, Array]:
    """What there is of a batch's columns, by name."""
    return {name: x for name, x in batch._asdict().items() if x is not None}


class Evaluation(NamedTuple):
    """The policy's view of a rollout: log-probabilities ``[T, n]``, values ``[T+1, n]``, carries ``[T+1, n, …]``."""

    log_probs: Array
    values: Array | None
    carries: Array | None = None


def begins(rollout: Rollout) -> Array:
    """1.0 where an observation begins an episode, ``[T+1, n]``; what is before the rollout isn't asked."""
    done = rollout.done.astype(jnp.float32)
    return jnp.concatenate([jnp.zeros_like(done[:1]), done])


def evaluate_rollout(net: PolicyNet, parameters: Parameters, rollout: Rollout, outputs: Array | None) -> Evaluation:
    """Log-probabilities of the actions and values of the observations, the last one included.

    Args:
        net: the networks.
        parameters: by name.
        rollout: ``[T, n, …]``.
        outputs: the actor's on this rollout, if it is known.
    """
    steps, n = rollout.rewards.shape
    rows = rollout.observations
    if net.core is not None:
        first, values, carries = nets.unroll(net, parameters, rows, rollout.memory, begins(rollout))
        known = first[:-1] if outputs is None else outputs
        log_probs = distributions.log_prob_and_entropy(net, parameters, known, rollout.actions)[0]
        return Evaluation(log_probs, values, carries)
    flat = rows.reshape((steps + 1) * n, -1)
    values = nets.critic(net, parameters, flat).reshape(steps + 1, n) if net.critic else None
    if outputs is None:
        outputs = nets.actor(net, parameters, flat[: steps * n]).reshape(steps, n, -1)
    return Evaluation(distributions.log_prob_and_entropy(net, parameters, outputs, rollout.actions)[0], values)


def next_values(net: PolicyNet, parameters: Parameters, rollout: Rollout, evaluation: Evaluation) -> Array:
    """V of what each step led to ``[T, n]``: of its own last observation where an episode was truncated."""
    assert evaluation.values is not None
    steps, n = rollout.rewards.shape

    def of_finals() -> Array:
        rows = rollout.final.reshape(steps * n, -1)
        if net.core is None:
            return nets.critic(net, parameters, rows).reshape(steps, n)
        assert evaluation.carries is not None
        carry = evaluation.carries[:-1].reshape(steps * n, -1)
        values = nets.unroll(net, parameters, rows[None], carry, jnp.zeros((1, steps * n)))[1]
        assert values is not None
        return values[0].reshape(steps, n)

    finals = lax.cond(rollout.truncated.any(), of_finals, lambda: jnp.zeros((steps, n)))
    return jnp.where(rollout.truncated, finals, evaluation.values[1:])


def to_units(x: Array, length: int) -> Array:
    """``[T, n, …]`` to samples ``[T·n, …]``, or to sequences of one environment each, ``[T/L·n, L, …]``."""
    steps, n = x.shape[:2]
    if length == 1:
        return x.reshape(steps * n, *x.shape[2:])
    parts = x.reshape(steps // length, length, n, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 2).reshape(steps // length * n, length, *x.shape[2:])


def first_episodes(rollout: Rollout) -> Array:
    """Where no episode of the environment had ended before in this rollout, bool ``[T, n]``."""
    over = rollout.over.astype(jnp.int32)
    return jnp.cumsum(over, 0) - over == 0


def make_batch(
    net: PolicyNet, parameters: Parameters, reference: Parameters | None, rollout: Rollout, config: Config, scale: Any
) -> tuple[Batch, Array]:
    """Values, log-probabilities, advantages and returns of a block's rollout.

    Args:
        net: the networks.
        parameters: by name; ``reference`` those of GRPO's reference policy, or None.
        reference: see ``parameters``.
        rollout: ``[T, n, …]``.
        config: the run's.
        scale: of rewards, see :func:`~lockstep.jax_engine.shards.normalizers.scale_of`, or None.

    Returns:
        The batch, and what a recurrent policy carries into the next rollout ``[n, carry_size]``.
    """
    length = config.sequence_length
    evaluation = evaluate_rollout(net, parameters, rollout, rollout.outputs)
    columns: dict[str, Array] = {
        "observations": rollout.observations[:-1],
        "actions": rollout.actions,
        "log_probs": evaluation.log_probs,
    }
    if config.algorithm == "grpo":
        columns |= group_columns(rollout, config)
        if reference is not None:
            columns["reference_log_probs"] = evaluate_rollout(net, reference, rollout, None).log_probs
    else:
        assert evaluation.values is not None
        rewards = scaled_rewards(rollout.rewards, scale, config.normalize.clip_rewards)
        following = next_values(net, parameters, rollout, evaluation)
        values = evaluation.values[:-1]
        columns["advantages"], columns["returns"] = gae(
            rewards, values, following, rollout.terminated, rollout.done, config.ppo.gamma, config.ppo.gae_lambda
        )
        columns["values"] = values
    carry = None
    if evaluation.carries is not None:
        columns["resets"] = begins(rollout)[:-1]
        into = jnp.concatenate([rollout.memory[None], evaluation.carries[length - 1 : config.num_steps - 1 : length]])
        carry = into.reshape(-1, into.shape[-1])
    batch = Batch(**{name: to_units(x, length) for name, x in columns.items()}, carry=carry)
    return batch, memory_after(rollout, evaluation)


def memory_after(rollout: Rollout, evaluation: Evaluation) -> Array:
    """What is carried into the next rollout: nothing into an episode that begins there."""
    if evaluation.carries is None:
        return rollout.memory
    return jnp.where(rollout.done[-1][:, None], 0.0, evaluation.carries[-2])


def group_columns(rollout: Rollout, config: Config) -> dict[str, Array]:
    """GRPO: each environment's first episode of the rollout against its group's; what follows doesn't count."""
    valid = first_episodes(rollout)
    with jax.enable_x64(True):
        rewards = jnp.where(valid, rollout.rewards, 0.0).astype(jnp.float64)
        returns = rewards.sum(0).reshape(-1, config.grpo.group_size)
        per_env = group_advantages(returns, config.grpo.normalize_std).reshape(-1).astype(jnp.float32)
    counted = valid.astype(jnp.float32)
    return {"advantages": per_env * counted, "valid": counted}
