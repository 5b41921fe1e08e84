"""Which episodes groups begin on the host."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from lockstep.core.episodes import EPISODES_PER_ITERATION
from lockstep.training.host_rollout import begin_groups


def test_no_iteration_begins_with_an_episode_of_another():
    """Ended environments go on with further episodes, whose starts would come again in the next iteration."""
    starts = []

    def reset():
        starts.append(envs.buffers.episodes.copy())

    envs: Any = SimpleNamespace(buffers=SimpleNamespace(episodes=np.zeros(3, np.int64)), reset=reset)
    for iteration in range(3):
        begin_groups(envs, iteration)
        envs.buffers.episodes += [0, 1, 1000]
    assert [len(set(start.tolist())) for start in starts] == [1, 1, 1]
    assert (np.diff(starts, axis=0) > 1000).all()
    assert EPISODES_PER_ITERATION > 1000
