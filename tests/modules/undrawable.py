"""CartPole that can be drawn ``$FRAMES`` times in a process, and then no more."""

import os

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

drawn = 0


class UndrawableCartPole(CartPoleEnv):
    """Without ``$FRAMES`` it is CartPole-v1."""

    def render(self):
        global drawn
        drawn += 1
        if drawn > int(os.environ.get("FRAMES", 1_000_000)):
            raise RuntimeError("the screen is gone")
        return super().render()


gymnasium.register("UndrawableCartPole-v0", "undrawable:UndrawableCartPole", max_episode_steps=500)
