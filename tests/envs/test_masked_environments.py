"""Environments that say which actions are allowed, apart from their observations."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.numbers import check_acted, check_numbers
from lockstep.envs.registry import make_envs

STEPS = 3


class Counted(gymnasium.Env):
    """Allows the action that is the number of the step; says nothing of it any more once an episode has ended."""

    observation_space, action_space = Box(0, 9, (1,), np.float32), Discrete(STEPS)

    def __init__(self, silent=STEPS, nothing=STEPS):
        self._silent, self._nothing = silent, nothing

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
        return (np.arange(STEPS) == self._clock) & (self._clock != self._nothing)


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


@pytest.mark.parametrize("source", ["info", "method"])
def test_a_mask_that_allows_nothing_is_left_to_whoever_acts_on_it(source):
    envs = begin(source, nothing=2)
    envs.step()
    envs.step()
    assert masks(envs.buffers.observations) == [[0.0] * STEPS] * 2
    with pytest.raises(EnvironmentFailureError, match=r"environment 0 .* mask that allows nothing in step 2 of"):
        check_acted(envs.description, envs.env_ids, envs.buffers.observations[None], 0, 2)


def test_a_mask_of_several_indices_allows_something_of_each():
    action = ActionLayout("multi_discrete", (2, 3), (0, 0), (2,))
    masks = np.array([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert action.possible(masks).tolist() == [[True, True], [False, True], [True, False]]


def test_nobody_is_asked_for_a_mask_of_steps_whose_action_is_ignored():
    description = EnvDescription(
        "Late-v0", ObservationLayout((Leaf("legal", "mask", (2,)),)), ActionLayout("discrete", (2,), (0,))
    )
    rows = np.ones((4, 2, 2), np.float32)
    rows[2, 1] = rows[3] = 0.0  # the last is the observation after three steps
    dead = np.zeros((3, 2), bool)
    with pytest.raises(
        EnvironmentFailureError, match=r"environment 7 .* mask that allows nothing in step 2 of iteration 5"
    ):
        check_numbers(description, [6, 7], rows, np.zeros((3, 2)), 4, dead=dead)
    dead[2, 1] = True
    check_numbers(description, [6, 7], rows, np.zeros((3, 2)), 4, dead=dead)
