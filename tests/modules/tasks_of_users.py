"""A task as a user of the library writes it."""

import corridors
import equinox as eqx
import jax

import lockstep.jax as ljax


class Net(eqx.Module):
    """One hidden layer."""

    hidden: eqx.nn.Linear
    heads: eqx.nn.Linear

    def __init__(self, inputs, outputs, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(inputs, 8, key=first)
        self.heads = eqx.nn.Linear(8, outputs + 1, key=second)

    def __call__(self, observations, key=None):
        out = jax.vmap(self.heads)(jax.nn.tanh(jax.vmap(self.hidden)(observations)))
        return out[:, :-1], out[:, -1]


class Corridors(ljax.Task):
    """Walk along a corridor; 2 for arriving, minus 0.1 a step."""

    given = None

    def environment(self):
        return corridors.Corridor(), None

    def reward_terms(self):
        return {
            "arrival": (2.0, lambda t: t.terminated & (t.next_state == t.state + 1)),
            "haste": (-0.1, lambda t: 1.0),
        }

    def policy_network(self, observations, num_outputs, key):
        return Net(observations.shape[-1], num_outputs, key)

    def initial_state(self, state):
        return self.given or state

    def on_update(self, update, metrics):
        assert metrics["reward/haste"] < 0
        self.updates = [*getattr(self, "updates", []), update]


def corridor_settings(**runner):
    """Two devices, four updates."""
    ppo = ljax.PPOConfig(n_steps=16, n_minibatches=2, max_grad_norm=None)
    return ppo, ljax.RunnerConfig(4 * 8 * 16, num_devices=2, num_envs=4, seed=1, **runner)
