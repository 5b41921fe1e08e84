"""Collecting a rollout inside the program: only the actor runs at each step; values come from one pass after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.spaces import ActionLayout
from lockstep.envs.rewards import RewardShaping
from lockstep.jax_engine.envs.protocol import JaxEnvironment, pick
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.encoders import action_mask, encode_rows
from lockstep.jax_engine.nets.nets import Parameters, PolicyNet
from lockstep.jax_engine.shards.keys import keyed
from lockstep.jax_engine.shards.normalizers import normalized
from lockstep.jax_engine.shards.words import Words
from lockstep.jax_engine.state import EnvCarry


class Rollout(NamedTuple):
    """A block's rollout, arrays ``[T, n, …]``.

    Attributes:
        observations: rows as the networks see them, with those that follow the last step: ``[T+1, n, width]``.
        raw: rows as the environment gave them, ``[T, n, width]``; None where nothing is normalised.
        actions: as the policy took them.
        outputs: the actor's, ``[T, n, outputs]``; None where the actor ran elsewhere.
        rewards: float32, as the learner gets them.
        terminated: bool, for the learner; ``truncated`` likewise.
        truncated: see ``terminated``.
        final: rows that each step led to, before any reset, as the networks see them ``[T, n, width]``.
        memory: what a recurrent policy carried into the rollout ``[n, carry_size]``.
        over: bool, where an episode of the environment ended.
        returns: of the episode up to this step, float32; ``lengths`` its steps, int32.
        lengths: see ``returns``.
        successes: int8: 1 task solved, -1 not solved, 0 not said.
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
    memory: Array
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
    """Random numbers of a block's rollout: action noise ``[T, n, outputs]``, and those of resets and steps."""

    noise: Array
    resets: Any
    steps: Any


def draw(config: Config, net: PolicyNet, env: JaxEnvironment, keys: Any, iteration: Array, shard: Array) -> Draws:
    """What a shard's rollout needs, keyed by ``(seed, purpose, iteration, shard)``, drawn at once.

    A reset's numbers are keyed by the step at which it happens: whether it does is not known beforehand.
    """
    rows = config.envs // config.shards
    shape = (config.num_steps, rows)
    return Draws(
        action_noise(config, net, keys["action"], iteration, shard),
        env.reset_random(keyed(keys["reset"], iteration, shard), shape),
        env.step_random(keyed(keys["step"], iteration, shard), shape),
    )


def action_noise(config: Config, net: PolicyNet, key: Array, iteration: Array, shard: Array) -> Array:
    """Noise of a shard's rollout keyed by ``(seed, "action", iteration, shard)``: float32 ``[T, rows, outputs]``.

    Gumbel for discrete actions, standard normal for continuous ones.
    """
    shape = (config.num_steps, config.envs // config.shards, net.action.outputs)
    chosen = keyed(key, iteration, shard)
    return (jax.random.gumbel if net.discrete else jax.random.normal)(chosen, shape, jnp.float32)


@dataclass(frozen=True)
class Actor:
    """The policy during a rollout: observation rows as the networks see them to actions.

    Attributes:
        net: its networks.
        parameters: by name.
    """

    net: PolicyNet
    parameters: Parameters

    def __call__(self, rows: Array, memory: Array, noise: Array) -> tuple[Array, Array, Array]:
        """Actions ``[n, …]``, the actor's output ``[n, outputs]`` and what a recurrent policy carries on."""
        net = self.net
        if net.core is None:
            output = nets.actor(net, self.parameters, rows)
        else:
            still = jnp.zeros((1, len(rows)), jnp.bool_)
            outputs, _, carries = nets.unroll(net, self.parameters, rows[None], memory, still, actor_only=True)
            output, memory = outputs[0], carries[0]
        return distributions.sample(net, self.parameters, output, noise), output, memory

    def native(self, actions: Array) -> Array:
        """What the environment takes, of the policy's actions: squashed or clipped to bounds."""
        return native_actions(self.net, distributions.squash(self.net, actions))


def native_actions(net: PolicyNet, actions: Array) -> Array:
    """Actions in the space's own numbers and shape, clipped to its bounds."""
    layout: ActionLayout = net.action
    if layout.kind == "discrete":
        return actions + layout.first[0] if layout.first[0] else actions
    if layout.kind == "multi_discrete":
        return (actions + jnp.asarray(layout.first, jnp.int32)).reshape(-1, *layout.shape)
    low, high = (np.asarray(bound, np.float32) for bound in (layout.low, layout.high))
    return jnp.clip(actions, low, high).reshape(-1, *layout.shape)


def shaped_rewards(shaping: RewardShaping, rewards: Array) -> Array:
    """The learner's rewards of the environment's."""
    if shaping.identity:
        return rewards
    out = jnp.sign(rewards) if shaping.sign else rewards
    out = out * shaping.scale if shaping.scale != 1.0 else out
    return out if shaping.clip is None else jnp.clip(out, *shaping.clip)


def begin(net: PolicyNet, env: JaxEnvironment, random: Any, carry_size: int) -> EnvCarry:
    """Begin an episode in each of ``n`` environments."""
    state, observation = env.reset(random)
    rows = encode_rows(net.observation, observation)
    zeros, none = jnp.zeros(len(rows)), jnp.zeros(len(rows), jnp.int32)
    return EnvCarry(state, rows, zeros, none, jnp.zeros((len(rows), carry_size)), zeros)


def restarted(env: JaxEnvironment, net: PolicyNet, done: Array, random: Any, state: Any, rows: Array) -> Any:
    """State and rows after the resets of done environments; costly resets happen only if there is one."""

    def fresh(state: Any, rows: Array) -> Any:
        first, observation = env.reset(random)
        return pick(done, (first, encode_rows(net.observation, observation)), (state, rows))

    if getattr(env, "cheap_reset", False):
        return fresh(state, rows)
    return lax.cond(done.any(), fresh, lambda state, rows: (state, rows), state, rows)


def collect(
    actor: Actor | RandomActor,
    env: JaxEnvironment,
    shaping: RewardShaping,
    config: Config,
    scale: Any,
    carry: EnvCarry,
    draws: Draws,
) -> tuple[EnvCarry, Rollout]:
    """Step a block's environments ``T`` times.

    Args:
        actor: the policy.
        env: the environments.
        shaping: what the learner gets of rewards.
        config: the run's.
        scale: of observations, see :func:`~lockstep.jax_engine.shards.normalizers.scale_of`, or None.
        carry: from the rollout before, arrays ``[n, …]``.
        draws: random numbers.
    """
    net, clip = actor.net, config.normalize.clip_observations
    limit = env.max_episode_steps

    layouts: list[Words] = []

    def look(rows: Array) -> Array:
        return normalized(net.observation, rows, scale, clip)

    def step(carry: EnvCarry, now: Draws) -> tuple[EnvCarry, Any]:
        seen = look(carry.rows)
        actions, output, memory = actor(seen, carry.memory, now.noise)
        stepped = env.step(carry.state, actor.native(actions), now.steps)
        rows, lengths = encode_rows(net.observation, stepped.observation), carry.lengths + 1
        late = stepped.truncated if limit is None else stepped.truncated | (lengths >= limit)
        truncated = late & ~stepped.terminated
        done = stepped.terminated | truncated
        state, first = restarted(env, net, done, now.resets, stepped.state, rows)
        returns = carry.returns + stepped.reward
        following = EnvCarry(
            state,
            first,
            jnp.where(done, 0.0, returns),
            jnp.where(done, 0, lengths),
            jnp.where(done[:, None], 0.0, memory),
            carry.discounted,
        )
        kept = {"actions": actions, "outputs": output, "rewards": stepped.reward, "returns": returns}
        kept |= {"lengths": lengths, "terminated": stepped.terminated, "truncated": truncated}
        if stepped.success is not None:
            kept["successes"] = stepped.success
        images = {"observations": seen, "final": look(rows)} | ({} if scale is None else {"raw": carry.rows})
        if not net.observation.image_bytes:
            kept, images = kept | images, {}
        layouts.append(Words.of(kept))
        terms = {name: term.mean() for name, term in stepped.terms.items()}
        return following, (layouts[-1].pack(kept), images, terms)

    after, (words, images, terms) = lax.scan(step, carry, draws)
    kept = layouts[-1].unpack(words) | images
    success = kept.pop("successes", None)
    observations = jnp.concatenate([kept.pop("observations"), look(after.rows)[None]])
    rewards = shaped_rewards(shaping, kept.pop("rewards"))
    rollout = Rollout(
        observations=observations,
        raw=kept.pop("raw", None),
        rewards=rewards,
        memory=carry.memory,
        over=kept["terminated"] | kept["truncated"],
        successes=jnp.zeros(rewards.shape, jnp.int8) if success is None else jnp.where(success, 1, -1).astype(jnp.int8),
        terms={name: term.mean() for name, term in terms.items()},
        **kept,
    )
    return after, rollout


def random_actions(net: PolicyNet, rows: Array, key: Array) -> Array:
    """Actions ``[n, …]`` of a random policy: uniform over what is allowed or within bounds, normal without bounds."""
    layout: ActionLayout = net.action
    if layout.discrete:
        noise = jax.random.gumbel(key, (len(rows), layout.outputs))
        mask = action_mask(net.observation, rows)
        return distributions.mode(net, noise if mask is None else jnp.where(mask, noise, nets.MASKED_LOGIT))
    low, high = (np.asarray(bound, np.float32) for bound in (layout.low, layout.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    least, most = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)
    uniform = jax.random.uniform(key, (len(rows), low.size), jnp.float32)
    normal = jax.random.normal(jax.random.fold_in(key, 1), (len(rows), low.size), jnp.float32)
    return jnp.where(bounded, least + (most - least) * uniform, normal)


@dataclass(frozen=True)
class RandomActor:
    """A random policy in the actor's place; the noise of a step is a key."""

    net: PolicyNet

    def __call__(self, rows: Array, memory: Array, noise: Array) -> tuple[Array, Array, Array]:
        """See :class:`Actor`."""
        actions = random_actions(self.net, rows, noise)
        return actions, jnp.zeros((len(rows), 0)), memory

    def native(self, actions: Array) -> Array:
        """See :class:`Actor`; random actions lie within the bounds already."""
        return native_actions(self.net, actions)
