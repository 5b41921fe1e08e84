"""CartPole with a disturbance from a generator that no seed reaches: another one each time it is replayed."""

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class ForgetfulCartPole(CartPoleEnv):
    """Its episodes are never the same twice."""

    _disturbance = np.random.default_rng()

    def step(self, action):
        observation, *rest = super().step(action)
        return observation + self._disturbance.normal(scale=1e-3, size=4).astype(np.float32), *rest


gymnasium.register("ForgetfulCartPole-v0", "forgetful:ForgetfulCartPole", max_episode_steps=500)
