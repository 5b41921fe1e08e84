"""EnvPool as it documents itself, small: pools that reset one step late and seed environment i with ``seed + i``."""

import numpy as np
from gymnasium.spaces import Box, Discrete


class Pool:
    """Environments that count their steps from a drawn start; episodes terminate after three or four steps.

    An episode with an even start ends by truncation instead.
    """

    def __init__(self, num_envs, seed, max_episode_steps=4):
        self.config = {"num_envs": num_envs, "seed": seed, "max_episode_steps": max_episode_steps}
        self.observation_space, self.action_space = Box(-99.0, 99.0, (2,), np.float64), Discrete(2)
        self._draws = [np.random.default_rng(seed + i) for i in range(num_envs)]
        self._rows, self._over = np.zeros((num_envs, 2)), np.zeros(num_envs, bool)
        self._sent = None
        self.closed = False

    def _begin(self, env):
        self._rows[env] = self._draws[env].integers(0, 50), 0

    def reset(self):
        for env in range(len(self._rows)):
            self._begin(env)
        return self._rows.copy(), {"env_id": np.arange(len(self._rows))}

    def send(self, actions):
        assert self._sent is None
        assert actions.shape == (len(self._rows),)
        self._sent = actions

    def recv(self):
        assert self._sent is not None
        self._sent = None
        late = self._over.copy()
        self._rows[~late, 1] += 1
        for env in np.flatnonzero(late):
            self._begin(env)
        rewards = np.where(late, 0.0, self._rows[:, 1]).astype(np.float32)
        even = self._rows[:, 0] % 2 == 0
        terminated = ~late & ~even & (self._rows[:, 1] >= 3)
        truncated = ~late & (self._rows[:, 1] >= self.config["max_episode_steps"])
        self._over = terminated | truncated
        return self._rows.copy(), rewards, terminated, truncated, {"env_id": np.arange(len(self._rows))}

    def close(self):
        self.closed = True


def list_all_envs():
    return ["Late-v0"]


def make(task_id, env_type, num_envs, seed, **settings):
    assert (task_id, env_type) == ("Late-v0", "gymnasium")
    return Pool(num_envs, seed, **settings)
