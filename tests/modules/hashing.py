"""An environment whose rewards depend on how Python hashes texts, as those that go through sets of names do."""

from handed_envs import Counting

NAMES = {"left", "right", "up", "down", "stay"}


class Hashing(Counting):
    """Rewards a step by the place of a name in the set's order, and by a name's hash."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        named = list(NAMES).index("left") + hash("right") % 1000 / 1000
        return observation, reward + named, terminated, truncated, info
