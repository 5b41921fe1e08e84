"""Runs a user's own rollout inside the compiled program, and makes what the engine learns from of its trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lockstep.config.run import Config
from lockstep.envs.rewards import RewardShaping
from lockstep.jax_engine.envs.protocol import JaxEnvironment
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.encoders import decode_rows, encode_rows
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.program.program import Collect, Program
from lockstep.jax_engine.rollout import Acted, Actor, Collector, Draws, Rollout, native_actions, shaped_rewards
from lockstep.jax_engine.shards.normalizers import Scale, normalized
from lockstep.jax_engine.state import EnvCarry


class Trajectory(NamedTuple):
    """Steps of environments, arrays ``[T, n, …]`` (of one step: ``[n, …]``).

    Attributes:
        obs: observations before each step, as :attr:`RolloutState.obs`.
        action: actions as the policy took them, before they are squashed or clipped to bounds.
        reward: float32.
        next_obs: observations after each step, before any reset.
        terminated: bool.
        truncated: bool: the episode was cut off, and bootstraps from the value of ``next_obs``.
        success: int8: 1 solved, -1 not solved, 0 not said.
        reward_terms: named terms to log, each a mean over environments ``[T]``.
        length: environment steps of the episode up to this one, int32; ends that the rollout adds don't reset it. None:
            each step here is counted as one.
    """

    obs: Any
    action: Array
    reward: Array
    next_obs: Any
    terminated: Array
    truncated: Array
    success: Array
    reward_terms: dict[str, Array]
    length: Array | None = None

    @property
    def done(self) -> Array:
        """Where an episode ended."""
        return self.terminated | self.truncated


@dataclass(frozen=True)
class RolloutModel:
    """The policy inside a rollout; observations are the environment's own, ``[n, …]``."""

    actor: Actor
    scale: Scale | None
    clip: float

    def _rows(self, obs: Any) -> Array:
        layout = self.actor.net.observation
        return normalized(layout, encode_rows(layout, obs), self.scale, self.clip)

    def __call__(self, obs: Any) -> tuple[Array, Array]:
        """Returns logits or means ``[n, outputs]`` and values ``[n]``."""
        output, values = nets.actor_critic(self.actor.net, self.actor.parameters, self._rows(obs))
        assert values is not None
        return output, values

    def sample(self, obs: Any, rng: Array) -> Array:
        """Samples actions ``[n, …]``."""
        net, rows = self.actor.net, self._rows(obs)
        noise = distributions.action_noise(net, rng, (len(rows), net.action.outputs))
        return self.actor(rows, jnp.zeros((len(rows), 0)), noise).actions

    def mode(self, obs: Any) -> Array:
        """Returns the likeliest actions ``[n, …]``."""
        return distributions.mode(self.actor.net, self(obs)[0])


class _Told(NamedTuple):
    """Stands in for an actor: takes the actions that it is given as noise."""

    net: PolicyNet

    def __call__(self, rows: Array, recurrent_state: Array, noise: Array) -> Acted:
        return Acted(noise, jnp.zeros((len(rows), 0)), recurrent_state)

    def native(self, actions: Array) -> Array:
        return native_actions(self.net, distributions.squash(self.net, actions))


@partial(jax.tree_util.register_dataclass, data_fields=["carry"], meta_fields=["net", "env"])
@dataclass(frozen=True)
class RolloutState:
    """The state of ``n`` environments inside a rollout: a pytree for ``lax.scan``."""

    carry: EnvCarry
    net: PolicyNet
    env: JaxEnvironment

    @property
    def obs(self) -> Any:
        """What each environment observes, as it returns it, ``[n, …]``; a Tuple becomes a dict by number (``"0"``)."""
        return decode_rows(self.net.observation, self.carry.rows)

    @property
    def state(self) -> Any:
        """The environments' own states."""
        return self.carry.state

    def step(self, action: Array, rng: Array) -> tuple[RolloutState, Trajectory]:
        """Takes one step; an episode that ends is followed by the next one, and the time limit counts.

        Args:
            action: ``[n, …]`` as :meth:`RolloutModel.sample` returns it.
            rng: random key of this step.

        Returns:
            The state after the step, and the step as a :class:`Trajectory` without the axis ``T``.
        """
        resets, steps = jax.random.split(rng)
        count, layout = (len(self.carry.rows),), self.net.observation
        draws = Draws(action, self.env.reset_random(resets, count), self.env.step_random(steps, count))
        collector = Collector(_Told(self.net), self.env, None, 0.0)  # pyright: ignore[reportArgumentType]
        after, kept = collector.step(self.carry, draws)
        found = collector.layout.unpack(kept.words) | kept.images
        success = found.get("successes")
        row = Trajectory(
            self.obs,
            found["actions"],
            found["rewards"],
            decode_rows(layout, found["final"]),
            found["terminated"],
            found["truncated"],
            jnp.zeros(count, jnp.int8) if success is None else jnp.where(success, 1, -1).astype(jnp.int8),
            kept.terms,
            found["lengths"],
        )
        return RolloutState(after, self.net, self.env), row


Hook = Callable[[RolloutModel, RolloutState, Array], tuple[Trajectory, RolloutState]]


def plain_rollout(
    model: RolloutModel, env_state: RolloutState, rng: Array, steps: int
) -> tuple[Trajectory, RolloutState]:
    """Takes ``steps`` steps with sampled actions."""

    def step(now: RolloutState, key: Array) -> tuple[RolloutState, Trajectory]:
        acting, stepping = jax.random.split(key)
        return now.step(model.sample(now.obs, acting), stepping)

    after, trajectory = lax.scan(step, env_state, jax.random.split(rng, steps))
    return trajectory, after


def users_rollout(hook: Hook) -> Collect:
    """Turns a user's rollout into the function with which a program collects a block."""

    def collect(
        program: Program, actor: Actor, scale: Scale | None, carry: EnvCarry, key: Array
    ) -> tuple[EnvCarry, Rollout]:
        env, config, shaping = program.env, program.config, program.description.rewards
        assert env is not None
        model = RolloutModel(actor, scale, config.normalize.clip_observations)
        trajectory, after = hook(model, RolloutState(carry, actor.net, env), key)
        return _learnable(model, trajectory, carry, after, config, shaping)

    return collect


def _learnable(
    model: RolloutModel, found: Trajectory, before: EnvCarry, after: Any, config: Config, shaping: RewardShaping
) -> tuple[EnvCarry, Rollout]:
    """Returns what environments carry on, and the engine's rollout made from a trajectory."""
    layout = model.actor.net.observation
    rewards = _checked(found, after, (config.num_steps, len(before.rows)))

    def rows_of(obs: Any) -> Array:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        return encode_rows(layout, flat).reshape(*rewards.shape, -1)

    def seen(rows: Array) -> Array:
        return normalized(layout, rows, model.scale, model.clip)

    def count(so_far: tuple[Array, Array], now: tuple[Array, Array]) -> Any:
        (returns, lengths), (reward, done) = so_far, now
        returns, lengths = returns + reward, lengths + 1
        return (jnp.where(done, 0.0, returns), jnp.where(done, 0, lengths)), (returns, lengths)

    truncated = found.truncated & ~found.terminated
    done = found.terminated | truncated
    ends, (returns, lengths) = lax.scan(count, (before.returns, before.lengths), (rewards, done))
    carry = after.carry._replace(returns=ends[0])  # lengths are the environments', for their time limit
    rows = rows_of(found.obs)
    rollout = Rollout(
        observations=jnp.concatenate([seen(rows), seen(carry.rows)[None]]),
        raw=None if model.scale is None else rows,
        actions=found.action,
        outputs=None,
        rewards=shaped_rewards(shaping, rewards),
        terminated=found.terminated,
        truncated=truncated,
        final=seen(rows_of(found.next_obs)),
        recurrent_state=before.recurrent_state,
        over=done,
        returns=returns,
        lengths=lengths if found.length is None else found.length,
        successes=found.success,
        terms={name: term.mean() for name, term in found.reward_terms.items()},
    )
    return carry, rollout


def _checked(found: Any, after: Any, shape: tuple[int, int]) -> Array:
    """Returns the rewards of a trajectory, float32.

    Raises:
        ValueError: a rollout returned something else than a trajectory of the right shape and a state; one line.
    """
    if not isinstance(found, Trajectory) or not isinstance(after, RolloutState):
        raise ValueError(
            f"rollout: it gave {type(found).__name__} and {type(after).__name__}; return a Trajectory and the "
            "env_state that its last step led to"
        )
    names = ("action", "reward", "terminated", "truncated", "success", "length")
    for name in names if found.length is not None else names[:-1]:
        have = jnp.shape(getattr(found, name))
        if have[:2] != shape:
            raise ValueError(f"rollout: {name} is of shape {have} and must begin with {shape}, steps and environments")
    return jnp.asarray(found.reward, jnp.float32)
