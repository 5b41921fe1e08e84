"""PureJaxRL's PPO on a benchmark case, written down again: it isn't on a package index.

The code is ours; what decides about its speed is as PureJaxRL publishes it (Lu et al. 2022, ``ppo.py``): gymnax's
environments, which reset themselves at once, in a wrapper that counts episodes; a flax network with actor and critic
apart; a scan over steps, one over time for GAE (unrolled by 16), one over epochs that permutes the whole batch, one
over minibatches; clipped values, advantages normalised in each minibatch, Adam with eps 1e-5. All of it is one program
on all cores; here a call of it is some iterations, so that there is a line to time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import distrax
import flax.linen as nn
import gymnax
import jax
import numpy as np
import optax
from flax.linen.initializers import constant, orthogonal
from flax.training.train_state import TrainState
from jax import numpy as jnp
from settings import Settings, read_settings

GAMMA, LAMBDA, CLIP, VALUE_COEF, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.5


class Actor(nn.Module):
    """Logits and values of observations; 2x64 tanh each."""

    outputs: int

    @nn.compact
    def __call__(self, obs: Any) -> tuple[Any, Any]:
        def layers(units: int, scale: float) -> Any:
            x = obs
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=orthogonal(np.sqrt(2)), bias_init=constant(0.0))(x))
            return nn.Dense(units, kernel_init=orthogonal(scale), bias_init=constant(0.0))(x)

        return distrax.Categorical(logits=layers(self.outputs, 0.01)), jnp.squeeze(layers(1, 1.0), axis=-1)


class Step(NamedTuple):
    """One step of all environments."""

    done: Any
    action: Any
    value: Any
    reward: Any
    log_prob: Any
    obs: Any
    episodes: Any


class Counted(NamedTuple):
    """State of environments whose episodes are counted."""

    inner: Any
    returns: Any
    lengths: Any
    last_returns: Any
    last_lengths: Any


class Trainer:
    """Functions of one case, all of them to be compiled."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.env, self.params = gymnax.make(settings.env)
        self.net = Actor(self.env.action_space(self.params).n)

    def init(self, key: Any) -> tuple[Any, ...]:
        """Agent, environments, observations and key before the first iteration."""
        at_net, at_envs, key = jax.random.split(key, 3)
        n, zeros = self.settings.num_envs, jnp.zeros(self.settings.num_envs)
        obs, inner = jax.vmap(self.env.reset, in_axes=(0, None))(jax.random.split(at_envs, n), self.params)
        parameters = self.net.init(at_net, obs[0])
        rule = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(self.rate, eps=1e-5))
        agent = TrainState.create(apply_fn=self.net.apply, params=parameters, tx=rule)
        counts = zeros.astype(jnp.int32)
        return agent, Counted(inner, zeros, counts, zeros, counts), obs, key

    def rate(self, count: Any) -> Any:
        """The learning rate, which falls to nought."""
        each = self.settings.num_epochs * self.settings.num_minibatches
        return self.settings.learning_rate * (1.0 - (count // each) / self.settings.iterations)

    def step(self, carry: tuple[Any, ...], _: Any) -> tuple[tuple[Any, ...], Step]:
        """One step of all environments."""
        agent, envs, obs, key = carry
        key, at_action, at_step = jax.random.split(key, 3)
        policy, value = agent.apply_fn(agent.params, obs)
        action = policy.sample(seed=at_action)
        keys = jax.random.split(at_step, self.settings.num_envs)
        stepped = jax.vmap(self.env.step, in_axes=(0, 0, 0, None))(keys, envs.inner, action, self.params)
        next_obs, inner, reward, done, _ = stepped
        returns, lengths = envs.returns + reward, envs.lengths + 1
        last_returns = jnp.where(done, returns, envs.last_returns)
        last_lengths = jnp.where(done, lengths, envs.last_lengths)
        envs = Counted(inner, returns * (1 - done), lengths * (1 - done), last_returns, last_lengths)
        seen = Step(done, action, value, reward, policy.log_prob(action), obs, (last_returns, last_lengths))
        return (agent, envs, next_obs, key), seen

    def loss(self, parameters: Any, batch: tuple[Step, Any, Any]) -> tuple[Any, Any]:
        """PPO's loss of a minibatch."""
        seen, advantages, targets = batch
        policy, value = self.net.apply(parameters, seen.obs)
        near = seen.value + (value - seen.value).clip(-CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum(jnp.square(value - targets), jnp.square(near - targets)).mean()
        ratio = jnp.exp(policy.log_prob(seen.action) - seen.log_prob)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantages).mean()
        entropy = policy.entropy().mean()
        total = policy_loss + VALUE_COEF * value_loss - self.settings.entropy_coef * entropy
        return total, (value_loss, policy_loss, entropy)

    def epoch(self, carry: tuple[Any, ...], _: Any) -> tuple[tuple[Any, ...], Any]:
        """All minibatches of the batch in a new order."""
        agent, batch, key = carry
        key, at_order = jax.random.split(key)
        size = self.settings.num_envs * self.settings.num_steps
        order, count = jax.random.permutation(at_order, size), self.settings.num_minibatches
        flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:])[order], batch)
        parts = jax.tree.map(lambda x: x.reshape(count, size // count, *x.shape[1:]), flat)

        def minibatch(agent: Any, part: Any) -> tuple[Any, Any]:
            found, gradients = jax.value_and_grad(self.loss, has_aux=True)(agent.params, part)
            return agent.apply_gradients(grads=gradients), found

        agent, losses = jax.lax.scan(minibatch, agent, parts)
        return (agent, batch, key), losses

    def iteration(self, carry: tuple[Any, ...], _: Any) -> tuple[tuple[Any, ...], Any]:
        """Rollout, advantages, update; the episodes' figures come out."""
        carry, seen = jax.lax.scan(self.step, carry, None, self.settings.num_steps)
        agent, envs, obs, key = carry
        _, last_value = agent.apply_fn(agent.params, obs)

        def backwards(later: tuple[Any, Any], now: Step) -> tuple[tuple[Any, Any], Any]:
            advantage, next_value = later
            delta = now.reward + GAMMA * next_value * (1 - now.done) - now.value
            advantage = delta + GAMMA * LAMBDA * (1 - now.done) * advantage
            return (advantage, now.value), advantage

        start = (jnp.zeros_like(last_value), last_value)
        _, advantages = jax.lax.scan(backwards, start, seen, reverse=True, unroll=16)
        batch = (seen, advantages, advantages + seen.value)
        (agent, _, key), losses = jax.lax.scan(self.epoch, (agent, batch, key), None, self.settings.num_epochs)
        return (agent, envs, obs, key), (seen.episodes, losses)


def main() -> None:
    settings = read_settings()
    trainer, count = Trainer(settings), settings.iterations_per_call
    carry = jax.jit(trainer.init)(jax.random.PRNGKey(0))
    train = jax.jit(lambda carry: jax.lax.scan(trainer.iteration, carry, None, count))
    for _ in range(settings.iterations // count):
        carry, _ = jax.block_until_ready(train(carry))
        settings.iteration_done()


if __name__ == "__main__":
    main()
