"""An environment that remembers all its steps, and has no hooks for that."""

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Tiring(CartPoleEnv):
    """Each step pays less than the one before, in whatever episode that was."""

    taken = 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.taken += 1
        return observation, float(reward) / self.taken, *rest


gymnasium.register("Tiring-v0", "tiring:Tiring", max_episode_steps=64)
