"""A task as users of pmap task libraries write it: a config of one's own, rewards, a model of two parts, a rollout."""

import logging
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import equinox as eqx
import jax
import jax.numpy as jnp

from lockstep.jax import DistributedPPOConfig, DistributedPPOTask, Reward, make

logger = logging.getLogger(__name__)


@dataclass
class BalancingConfig(DistributedPPOConfig):
    """With settings of its own."""

    hidden_size: int = 8
    start_noise: float = 0.02


@dataclass(frozen=True)
class UprightReward(Reward):
    def get_reward(self, transition):
        return jnp.cos(transition.next_state["env"]["theta"])


class EffortPenalty:
    scale = -0.01
    name = "effort"

    def __call__(self, transition):
        return jnp.float32(transition.action)


class Model(eqx.Module):
    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, rng, size):
        actor, critic = jax.random.split(rng)
        self.actor = eqx.nn.MLP(4, 2, size, 1, jnp.tanh, key=actor)
        self.critic = eqx.nn.MLP(4, 1, size, 1, jnp.tanh, key=critic)


class BalancingTask(DistributedPPOTask[BalancingConfig]):
    def get_environment(self):
        return make("CartPole-v1")

    def get_rewards(self, env):
        return [UprightReward(weight=2.0), EffortPenalty()]

    def get_initial_model(self, rng):
        return Model(rng, self.config.hidden_size)

    def get_initial_env_state(self, rng):
        env, params = self.get_environment()
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(rng, self.config.num_envs), params)
        noise = self.config.start_noise
        return obs.at[:, 0].add(noise), {**state, "env": {**state["env"], "x": state["env"]["x"] + noise}}

    def rollout(self, model, env_state, model_carry, rng):
        def step(env_state, rng):
            act, move = jax.random.split(rng)
            return env_state.step(model.sample(env_state.obs, act), move)

        env_state, trajectory = jax.lax.scan(step, env_state, jax.random.split(rng, self.num_steps))
        return trajectory, env_state, model_carry


def config(**changes):
    """Two devices, three updates."""
    settings: dict[str, Any] = dict(
        num_envs=8, batch_size=4, num_batches=2, num_devices=2, pmap_axis_name="device", grad_sync_period=1,
        num_passes=2, rollout_length_seconds=0.16, ctrl_dt=0.02, total_timesteps=3 * 8 * 8, seed=1,
    )  # fmt: skip
    return BalancingConfig(**(settings | changes))


def main():
    """Check the set-up, and train."""
    task = BalancingTask(config())
    state, history = task.run_distributed_training()
    logger.info("upright %s", history["reward/upright"])
    return task, state, history


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG)
    main()
