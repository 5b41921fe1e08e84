"""Collects a rollout inside the program. Only the actor runs at each step; one pass afterwards computes values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.envs.rewards import RewardShaping
from lockstep.jax_engine.envs.protocol import JaxEnvironment, Tree, pick
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.encoders import encode_rows
from lockstep.jax_engine.nets.nets import Parameters, PolicyNet
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.normalizers import Scale, normalized
from lockstep.jax_engine.shards.packing import PackedLayout
from lockstep.jax_engine.state import EnvCarry


class Rollout(NamedTuple):
    """The rollout of a block's environments, arrays ``[T, n, …]``.

    Attributes:
        observations: rows as the networks see them, and those after the last step: ``[T+1, n, width]``.
        raw: rows as the environment gave them, ``[T, n, width]``; None if nothing is normalised.
        actions: as the policy took them.
        outputs: the actor's, ``[T, n, outputs]``; None if the actor ran elsewhere.
        rewards: float32, after reward shaping.
        terminated: bool, for the learner; so is ``truncated``.
        final: rows that each step led to, before any reset, as the networks see them ``[T, n, width]``.
        recurrent_state: of a recurrent policy before the rollout, ``[n, state_size]``.
        over: bool, where an episode of the environment ended.
        returns: of the episode up to this step, float32; ``lengths`` are its steps, int32.
        successes: int8: 1 if the task is solved, -1 if not, 0 if the environment doesn't say.
        terms: named reward terms, each averaged over the block's samples ``[]``.
    """

    observations: Array
    raw: Array | None
    actions: Array
    outputs: Array | None
    rewards: Array
    terminated: Array
    truncated: Array
    final: Array
    recurrent_state: Array
    over: Array
    returns: Array
    lengths: Array
    successes: Array
    terms: dict[str, Array]

    @property
    def done(self) -> Array:
        """Where an episode ended for the learner."""
        return self.terminated | self.truncated


class Draws(NamedTuple):
    """The random numbers of a block's rollout.

    Attributes:
        noise: of actions, float32 ``[T, n, outputs]``; for random actions, keys ``[T]``.
        resets: the draws of a reset at each step, in the environment's form, ``[T, n, …]``.
        steps: the draws of each step, ``[T, n, …]``, or None.
    """

    noise: Array
    resets: Tree
    steps: Tree


class Acted(NamedTuple):
    """A policy's actions ``[n, …]``, the actor's outputs ``[n, outputs]``, and the recurrent state after the step."""

    actions: Array
    outputs: Array
    recurrent_state: Array


def draw(
    config: Config,
    net: PolicyNet,
    env: JaxEnvironment,
    keys: Mapping[str, Array],
    iteration: Array,
    shard: Array,
    group: int,
) -> Draws:
    """Draws all random numbers of a shard's rollout, keyed by ``(seed, purpose, iteration, shard)``.

    A reset's numbers are drawn for every step, because it isn't known beforehand where an episode ends. Members of a
    ``group`` share the draws of their steps, so that only their actions tell them apart. Each draws its own resets:
    what follows a member's first episode isn't compared.
    """
    steps, rows = config.num_steps, config.envs // config.shards
    return Draws(
        action_noise(config, net, keys["action"], iteration, shard),
        env.reset_random(keyed(keys["reset"], iteration, shard), (steps, rows)),
        for_members(env.step_random(keyed(keys["step"], iteration, shard), (steps, rows // group)), group, axis=1),
    )


def for_members(draws: Tree, group: int, axis: int) -> Tree:
    """Repeats the draws of groups, which lie along ``axis``, for the ``group`` members of each, side by side."""
    return draws if group == 1 else jax.tree.map(lambda x: jnp.repeat(x, group, axis), draws)


def action_noise(config: Config, net: PolicyNet, key: Array, iteration: Array, shard: Array) -> Array:
    """Draws a shard's action noise, keyed by ``(seed, "action", iteration, shard)``: float32 ``[T, rows, outputs]``.

    It is Gumbel for discrete actions and standard normal for continuous ones.
    """
    shape = (config.num_steps, config.envs // config.shards, net.action.outputs)
    return distributions.action_noise(net, keyed(key, iteration, shard), shape)


@dataclass(frozen=True)
class Actor:
    """Samples actions from the networks."""

    net: PolicyNet
    parameters: Parameters

    def __call__(self, rows: Array, recurrent_state: Array, noise: Array) -> Acted:
        """Samples actions for normalised observation rows ``[n, width]``, with noise float32 ``[n, outputs]``."""
        net = self.net
        if net.core is None:
            output = nets.actor(net, self.parameters, rows)
        else:
            still = jnp.zeros((1, len(rows)), jnp.bool_)
            outputs, _, states = nets.unroll(net, self.parameters, rows[None], recurrent_state, still, actor_only=True)
            output, recurrent_state = outputs[0], states[0]
        return Acted(distributions.sample(net, self.parameters, output, noise), output, recurrent_state)

    def native(self, actions: Array) -> Array:
        """Converts actions ``[n, …]`` to the environment's: squashed or clipped to the bounds."""
        return native_actions(self.net, distributions.squash(self.net, actions))


def native_actions(net: PolicyNet, actions: Array) -> Array:
    """Converts actions to the space's own numbers and shape, clipped to its bounds."""
    layout = net.action
    if layout.kind == "discrete":
        return actions + layout.first[0] if layout.first[0] else actions
    if layout.kind == "multi_discrete":
        return (actions + jnp.asarray(layout.first, jnp.int32)).reshape(-1, *layout.shape)
    low, high = (np.asarray(bound, np.float32) for bound in (layout.low, layout.high))
    return jnp.clip(actions, low, high).reshape(-1, *layout.shape)


def shaped_rewards(shaping: RewardShaping, rewards: Array) -> Array:
    """Applies sign, scale and clipping to the environment's rewards, for the learner."""
    if shaping.identity:
        return rewards
    out = jnp.sign(rewards) if shaping.sign else rewards
    out = out * shaping.scale if shaping.scale != 1.0 else out
    return out if shaping.clip is None else jnp.clip(out, *shaping.clip)


def begin(net: PolicyNet, env: JaxEnvironment, random: Tree) -> EnvCarry:
    """Begins an episode in each of ``n`` environments, with the draws of their resets ``[n, …]``."""
    state, observation = env.reset(random)
    rows = encode_rows(net.observation, observation)
    zeros, none = jnp.zeros(len(rows)), jnp.zeros(len(rows), jnp.int32)
    return EnvCarry(state, rows, zeros, none, jnp.zeros((len(rows), net.state_size)), zeros)


def restarted(
    env: JaxEnvironment, net: PolicyNet, done: Array, random: Tree, state: Tree, rows: Array
) -> tuple[Tree, Array]:
    """Resets the environments that are done; returns state and rows ``[n, width]``.

    Unless a reset is cheap, it runs only if an environment is done.
    """

    def fresh(state: Tree, rows: Array) -> tuple[Tree, Array]:
        first, observation = env.reset(random)
        return pick(done, (first, encode_rows(net.observation, observation)), (state, rows))

    if getattr(env, "cheap_reset", False):
        return fresh(state, rows)
    return lax.cond(done.any(), fresh, lambda state, rows: (state, rows), state, rows)


class Kept(NamedTuple):
    """What a step keeps: small columns as words of one matrix, columns of bytes (images) separately, reward terms."""

    words: Array
    images: dict[str, Array]
    terms: dict[str, Array]


class Collector:
    """Steps a block's environments with a policy, inside a scan.

    Attributes:
        layout: of :attr:`Kept.words`; known once a step has been traced.
    """

    layout: PackedLayout

    def __init__(self, policy: Actor | RandomActor, env: JaxEnvironment, scale: Scale | None, clip: float) -> None:
        self.policy, self.env, self.scale, self.clip = policy, env, scale, clip

    def seen(self, rows: Array) -> Array:
        """Normalises observation rows for the networks."""
        return normalized(self.policy.net.observation, rows, self.scale, self.clip)

    def step(self, carry: EnvCarry, now: Draws) -> tuple[EnvCarry, Kept]:
        """Takes one step, resets environments that are done, and keeps the rollout's columns."""
        policy, net, limit = self.policy, self.policy.net, self.env.max_episode_steps
        seen = self.seen(carry.rows)
        acted = policy(seen, carry.recurrent_state, now.noise)
        stepped = self.env.step(carry.state, policy.native(acted.actions), now.steps)
        rows, lengths = encode_rows(net.observation, stepped.observation), carry.lengths + 1
        late = stepped.truncated if limit is None else stepped.truncated | (lengths >= limit)
        truncated = late & ~stepped.terminated
        done = stepped.terminated | truncated
        state, first = restarted(self.env, net, done, now.resets, stepped.state, rows)
        returns = carry.returns + stepped.reward
        following = EnvCarry(
            state,
            first,
            jnp.where(done, 0.0, returns),
            jnp.where(done, 0, lengths),
            jnp.where(done[:, None], 0.0, acted.recurrent_state),
            carry.discounted,
        )
        kept = {"actions": acted.actions, "outputs": acted.outputs, "rewards": stepped.reward, "returns": returns}
        kept |= {"lengths": lengths, "terminated": stepped.terminated, "truncated": truncated}
        if stepped.success is not None:
            kept["successes"] = stepped.success
        images = {"observations": seen, "final": self.seen(rows)} | ({} if self.scale is None else {"raw": carry.rows})
        if not net.observation.image_bytes:
            kept, images = kept | images, {}
        self.layout = PackedLayout.of(kept)
        return following, Kept(self.layout.pack(kept), images, {k: term.mean() for k, term in stepped.terms.items()})


def collect(
    policy: Actor | RandomActor,
    env: JaxEnvironment,
    shaping: RewardShaping,
    config: Config,
    scale: Scale | None,
    carry: EnvCarry,
    draws: Draws,
) -> tuple[EnvCarry, Rollout]:
    """Steps a block's environments ``T`` times from ``carry``; ``scale`` normalises observations."""
    collector = Collector(policy, env, scale, config.normalize.clip_observations)
    after, steps = lax.scan(collector.step, carry, draws)
    kept = collector.layout.unpack(steps.words) | steps.images
    success = kept.pop("successes", None)
    rewards = shaped_rewards(shaping, kept.pop("rewards"))
    rollout = Rollout(
        observations=jnp.concatenate([kept.pop("observations"), collector.seen(after.rows)[None]]),
        raw=kept.pop("raw", None),
        rewards=rewards,
        recurrent_state=carry.recurrent_state,
        over=kept["terminated"] | kept["truncated"],
        successes=jnp.zeros(rewards.shape, jnp.int8) if success is None else jnp.where(success, 1, -1).astype(jnp.int8),
        terms={name: term.mean() for name, term in steps.terms.items()},
        **kept,
    )
    return after, rollout


@dataclass(frozen=True)
class RandomActor:
    """Takes random actions in place of an :class:`Actor`; the noise of a step is a key."""

    net: PolicyNet

    def __call__(self, rows: Array, recurrent_state: Array, noise: Array) -> Acted:
        """See :meth:`Actor.__call__`."""
        actions = distributions.random_actions(self.net, rows, noise)
        return Acted(actions, jnp.zeros((len(rows), 0)), recurrent_state)

    def native(self, actions: Array) -> Array:
        """See :meth:`Actor.native`; random actions lie within the bounds already."""
        return native_actions(self.net, actions)
