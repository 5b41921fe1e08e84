"""A task of one's own on two devices: a point is pushed to a target, by rewards with names.

    python examples/custom_task.py

needs no accelerator: two devices are made of the CPU. It takes less than a minute.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

jax.config.update("jax_num_cpu_devices", 2)  # before JAX looks at its devices; leave it out on GPUs

import lockstep.jax as ljax  # noqa: E402


class PushPoint(ljax.Environment):
    """A point on a table with friction; its state is position and velocity, both ``[2]``; the target is the origin."""

    max_episode_steps = 40
    step_draws = False

    def reset(self, key, params=None):
        state = {"position": jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0), "velocity": jnp.zeros(2)}
        return self.observed(state), state

    def step(self, key, state, action, params=None):
        velocity = 0.8 * state["velocity"] + 0.1 * action
        state = {"position": state["position"] + velocity, "velocity": velocity}
        lost = jnp.linalg.norm(state["position"]) > 3.0
        return self.observed(state), state, 0.0, lost, {}

    def observed(self, state):
        return jnp.concatenate([state["position"], state["velocity"]])

    def observation_space(self, params=None):
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (2,), np.float32)


class Policy(eqx.Module):
    """Actor and critic on one layer of features."""

    features: eqx.nn.Linear
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear

    def __init__(self, num_inputs, num_outputs, key):
        keys = jax.random.split(key, 3)
        self.features = eqx.nn.Linear(num_inputs, 64, key=keys[0])
        self.actor = eqx.nn.Linear(64, num_outputs, key=keys[1])
        self.critic = eqx.nn.Linear(64, 1, key=keys[2])

    def __call__(self, observations, key=None):
        x = jnp.tanh(jax.vmap(self.features)(observations))
        return 0.1 * jax.vmap(self.actor)(x), jax.vmap(self.critic)(x)[:, 0]


class ReachTarget(ljax.Task):
    """Be near the target, save effort, and don't fall off the table."""

    def environment(self):
        return PushPoint(), None

    def reward_terms(self):
        return {
            "nearness": (1.0, lambda t: jnp.exp(-2.0 * jnp.linalg.norm(t.next_state["position"]))),
            "effort": (-0.05, lambda t: jnp.sum(jnp.square(t.action))),
            "fall": (-5.0, lambda t: t.terminated),
        }

    def policy_network(self, observations, num_outputs, key):
        return Policy(observations.shape[-1], num_outputs, key)

    def sync_gradients(self, grads, axis_name):
        """As half-precision numbers: half the bytes on the wire. Leave this out for the engine's exact reduction."""
        small = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
        return jax.tree.map(lambda g: g.astype(jnp.float32), jax.lax.pmean(small, axis_name))


def main():
    """Check the set-up, train, and try the policy."""
    task = ReachTarget(
        ljax.PPOConfig(learning_rate=1e-3, n_steps=40, n_epochs=4, ent_coef=0.0),
        ljax.RunnerConfig(total_timesteps=2 * 32 * 40 * 60, num_devices=2, num_envs=32, seed=0),
        axis_name="devices",
        batch_size=8,
        num_batches=4,
        log_devices_every=30,
    )
    task.verify_distributed_setup()
    state, history = task.train()
    for name in ("episode_return", "reward/nearness", "reward/effort", "reward/fall"):
        print(f"{name}: {history[name][0]:.3f} in the first update, {history[name][-1]:.3f} in the last")
    print("pushed from (1, 0):", np.round(ljax.PPO.act(state, jnp.array([1.0, 0.0, 0.0, 0.0])), 2))


if __name__ == "__main__":
    main()
