"""Environments that say which actions are allowed, apart from their observations."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.describe import describe
from lockstep.envs.registry import make_envs

STEPS = 3


class Counted(gymnasium.Env):
    """Allows the action that is the number of the step; says nothing of it any more once an episode has ended."""

    observation_space, action_space = Box(0, 9, (1,), np.float32), Discrete(STEPS)

    def __init__(self, silent=STEPS):
        self._silent = silent

    def reset(self, *, seed=None, options=None):
        self._clock = 0
        return self._told()

    def step(self, action):
        self._clock += 1
        observation, info = self._told()
        return observation, float(action == self._clock - 1), self._clock == STEPS, False, info

    def _told(self):
        info = {} if self._clock >= self._silent else {"action_mask": self.action_masks()}
        return np.full(1, self._clock, np.float32), info

    def action_masks(self):
        if self._clock == STEPS:
            raise IndexError("the episode has ended")
        return np.arange(STEPS) == self._clock


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register("Counted-v0", lambda **kwargs: Counted(**kwargs))
    yield
    del gymnasium.registry["Counted-v0"]


def begin(source, **kwargs):
    config = EnvConfig(id="Counted-v0", action_mask=source, kwargs=kwargs)
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail, "reset")
    envs.reset()
    return envs


def masks(rows):
    return rows[:, 1:].tolist()


@pytest.mark.parametrize("source", ["info", "method"])
def test_a_mask_comes_with_every_observation_but_the_one_that_ends_an_episode(source):
    envs = begin(source)
    for step in range(2 * STEPS):
        allowed = [[float(n == step % STEPS) for n in range(STEPS)]] * 2
        assert masks(envs.buffers.observations) == allowed
        envs.buffers.actions[:] = step % STEPS
        envs.step()
        assert envs.buffers.terminated.all() == (step % STEPS == STEPS - 1)
    assert masks(envs.buffers.final_observations) == [[1.0] * STEPS] * 2
    assert envs.buffers.final_observations[:, 0].tolist() == [STEPS] * 2


def test_an_episode_that_goes_on_without_a_mask_is_an_error():
    envs = begin("info", silent=2)
    envs.step()
    with pytest.raises(EnvironmentFailureError, match=r"env\.action_mask is 'info', but info has no 'action_mask'"):
        envs.step()
