"""GRPO's groups: their environments begin in the same state, and only their first episodes in a rollout count."""

from __future__ import annotations

import jax
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.jax_engine.advantages import group_advantages
from lockstep.jax_engine.rollout import Rollout


def mark_first_episodes(rollout: Rollout) -> Array:
    """Returns True where no episode of the environment has ended before in this rollout, bool ``[T, n]``."""
    over = rollout.over.astype(jnp.int32)
    return jnp.cumsum(over, 0) - over == 0


def mark_finished_episodes(rollout: Rollout) -> Array:
    """Returns True where an environment's first episode ended, or was cut by the rollout's end, bool ``[T, n]``."""
    over = rollout.over
    last = jnp.arange(over.shape[0])[:, None] == over.shape[0] - 1
    return mark_first_episodes(rollout) & (over | last)


def group_columns(rollout: Rollout, config: Config) -> dict[str, Array]:
    """Compares each environment's first episode with its group's: ``advantages`` and ``valid``, float32 ``[T, n]``.

    Steps after the first episode don't count.
    """
    valid = mark_first_episodes(rollout)
    with jax.enable_x64(True):
        rewards = jnp.where(valid, rollout.rewards, 0.0).astype(jnp.float64)
        returns, magnitudes = (x.sum(0).reshape(-1, config.grpo.group_size) for x in (rewards, jnp.abs(rewards)))
        advantages = group_advantages(returns, magnitudes, config.grpo.normalize_std)
        per_env = advantages.reshape(-1).astype(jnp.float32)
    counted = valid.astype(jnp.float32)
    return {"advantages": per_env * counted, "valid": counted}
