"""An environment that fails in runs of one seed alone."""

from handed_envs import Counting


class FailingSeed(Counting):
    """Fails where its first reset is seeded as in a run of seed 3."""

    def reset(self, *, seed=None, options=None):
        """Starts an episode, or fails."""
        if seed in SEEDS_OF_THREE:
            raise RuntimeError("the third seed")
        return super().reset(seed=seed)


def _seeds_of_three():
    from lockstep.core.shards import keyed_seed

    return {keyed_seed(3, "reset", env, 1) for env in range(8)}


SEEDS_OF_THREE = _seeds_of_three()
