"""Environments of a user's own whose functions fail, each at a line that says so."""

import jax.numpy as jnp
from corridors import Corridor


class FailingStep(Corridor):
    def step(self, key, state, action, params):
        return self._moved(state)

    def _moved(self, state):
        return jnp.zeros(3) + jnp.zeros(2) + state  # the step fails here


class FailingReset(Corridor):
    def reset(self, key, params):
        raise KeyError("start")  # the reset fails here


class FailingSpace(Corridor):
    def action_space(self, params):
        raise RuntimeError("no actions")  # the space fails here


def failing_term(transition):
    return transition.next_state["x"]  # the term fails here
