"""CartPole as a user's class that the JAX engine steps inside its program; and with what may go wrong around it.

``mishaps:cart_pole`` is what the others are without their mishap, which begins when the environment is made.
"""

import os
import signal
import time

from jax import lax
from jax import numpy as jnp

from lockstep.envs import arrays
from lockstep.jax_engine.distributed.reductions import AXES, device_index, gather_shards, tree_sum
from lockstep.jax_engine.envs.simulators import SingleArrayEnvironment
from lockstep.jax_engine.nets import parameters
from lockstep.jax_engine.program.runner import DeviceRunner
from lockstep.jax_engine.update import Update
from lockstep.runs import checkpoint_writer


def cart_pole():
    return SingleArrayEnvironment(arrays.CartPole())


# --- mistakes that the proof must find --------------------------------------------------------------------------------


def shuffled_over_devices(self, learner, samples, *rest, original=Update.__call__):
    """The mistake of permuting all samples: every device needs those of all."""
    everyone = gather_shards(samples)
    own = (device_index() * len(samples) + 1) % len(everyone)
    return original(self, learner, lax.dynamic_slice_in_dim(everyone, own, len(samples)), *rest)


def rotated_over_devices(self, learner, samples, *rest, original=Update.__call__):
    """The same mistake by another collective."""
    return original(self, learner, lax.ppermute(samples, AXES, [(0, 1), (1, 0)]), *rest)


def shuffled():
    """Samples cross from device to device."""
    Update.__call__ = shuffled_over_devices  # pyright: ignore[reportAttributeAccessIssue]
    return cart_pole()


def unreduced():
    """Each device steps with the gradient of its own shards."""
    parameters.sum_shards = tree_sum
    return cart_pole()


def forgetting():
    """A resumed run begins new episodes, and a recurrent policy carries nothing into them."""

    def restore(self, state, shards, original=DeviceRunner.restore):
        restarted = original(self, state, shards)
        self.state = self.state._replace(envs=self._initial(self.state._replace(envs=None), self.owned).envs)
        return restarted

    DeviceRunner.restore = restore
    return cart_pole()


# --- faults ---------------------------------------------------------------------------------------------------------


class Poisoned(SingleArrayEnvironment):
    """Its last reward of an episode is no number."""

    def step(self, key, state, action, params=None):
        observation, state, reward, terminated, *rest = super().step(key, state, action, params)
        return observation, state, jnp.where(terminated, jnp.nan, reward), terminated, *rest


def poisoned():
    """Gives rewards that are no numbers where ``$POISON`` is set."""
    return Poisoned(arrays.CartPole()) if "POISON" in os.environ else cart_pole()


class Blinded(SingleArrayEnvironment):
    """Observes infinity where the pole leans to one side."""

    def step(self, key, state, action, params=None):
        observation, *rest = super().step(key, state, action, params)
        return jnp.where(observation[2] > 0.05, jnp.inf, observation), *rest


def blinded():
    """Gives observations that are infinite."""
    return Blinded(arrays.CartPole())


def dying():
    """The process is killed while it writes the checkpoint ``$DIES``, once all eight iterations have been logged."""

    def write(path, content, original=checkpoint_writer.write_synced):
        if not path.parent.name.startswith(f".{os.environ.get('DIES')}.") or path.name != "optimizer.safetensors":
            return original(path, content)
        original(path, content[: len(content) // 2])
        metrics, deadline = path.parents[2] / "metrics.jsonl", time.monotonic() + 600
        while metrics.read_text().count("\n") < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_writer.write_synced = write
    return cart_pole()
