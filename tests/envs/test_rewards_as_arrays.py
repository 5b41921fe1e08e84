"""Rewards that come as arrays of one element, which float() doesn't take: every wrapper that adds them up does."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.atari import AtariLives
from lockstep.envs.registry import make_envs


class Shaped(gymnasium.Env):
    """Pays one more than the action, in an array; as a game it loses a life with every action but FIRE."""

    observation_space, action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3)
    ale, left = property(lambda self: self), 3

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "UP"]

    def lives(self):
        return self.left

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= action != 1
        return np.zeros(2, np.float32), np.array([1.0 + action]), False, False, {}


@pytest.mark.parametrize("skip", [1, 3])
def test_a_skipped_frame_adds_them(skip):
    gymnasium.register("Shaped-v0", lambda **_: Shaped())
    try:
        config = EnvConfig(id="Shaped-v0", frame_skip=skip)
        envs = make_envs(config, describe(config), 3, range(2), pytest.fail)
        envs.reset()
        envs.buffers.actions[:] = [1, 2]
        envs.step()
        assert envs.buffers.rewards.tolist() == [2.0 * skip, 3.0 * skip]
    finally:
        del gymnasium.registry["Shaped-v0"]


def test_a_game_that_presses_fire_adds_them():
    env = AtariLives(Shaped(), fire=True, life_loss=True)
    env.reset(seed=0)
    reward = env.step(0)[1]
    assert (type(reward), reward) == (float, 3.0)
