"""An environment that can be made only where MKL was asked for steady products before anything was imported."""

import os

import gymnasium as gym

ASKED = os.environ.get("MKL_CBWR")


class Steadied(gym.Wrapper):
    def __init__(self):
        assert ASKED == "AUTO", f"MKL_CBWR is {ASKED}"
        super().__init__(gym.make("CartPole-v1"))
