"""An Atari game in its standard wrappers: the same agent on two ranks, and after a stop in the middle of its games."""

import pytest
from command_line import metrics_of, resume, same, train

BREAKOUT = (
    *("ALE/Breakout-v5", "--num-envs", 2, "--num-shards", 2, "--num-steps", 64, "--total-steps", 1024),
    *("--ppo.num-epochs", 1, "--ppo.num-minibatches", 2, "--network.image.width", 0.125, "--log.no-tensorboard"),
)


@pytest.mark.long
def test_games_are_the_same_on_two_ranks_and_after_a_stop_in_their_middle(tmp_path):
    whole = train(tmp_path, *BREAKOUT, "--nproc", 2, name="whole")
    stopped = train(tmp_path, *BREAKOUT, "--stop-at-step", 128, name="stopped")
    assert stopped.summary["episodes"] == 0  # 64 steps into the first games, in which lives were lost
    resumed = resume(stopped.path)
    assert resumed.summary["restarted_environments"] == []
    same(whole, resumed)
    last = metrics_of(whole.path)[-1]
    assert last["rollout/episodes"] > 0
    assert last["rollout/episode_length_mean"] > 100  # whole games: a life lasts about 25 steps
