"""An episode at play: what an environment returns is read as training reads it."""

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np

from lockstep.policies.videos import play_episode


class Shaped(gymnasium.Wrapper):
    """Gives each reward in an array of one element."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, np.array([reward]), *rest


class Left:
    """Pushes to the left."""

    config = SimpleNamespace(env=SimpleNamespace(id="Shaped"), eval=SimpleNamespace(max_steps=500))
    environment = {"mask_from": ""}  # noqa: RUF012

    def reset(self):
        pass

    def __call__(self, *_):
        return 0


def test_rewards_of_one_element_are_added_as_numbers():
    policy: Any = Left()
    plain = play_episode(gymnasium.make("CartPole-v1"), policy, None, 3, True)
    assert play_episode(Shaped(gymnasium.make("CartPole-v1")), policy, None, 3, True) == plain
    assert plain[0] == plain[1] > 5
