"""Lost lives and shaped rewards: what the learner gets of a rollout, and what episodes and replays get of it."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from small_runs import final_of

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.atari import LIFE_LOST
from lockstep.envs.registry import make_envs
from lockstep.envs.rewards import RewardShaping
from lockstep.torch_engine.batch import make_batch
from lockstep.torch_engine.groups import finished_episodes
from lockstep.torch_engine.rollout import Rollout, action_noise, collect
from lockstep.torch_engine.state import init_state


class Lives(gymnasium.Env):
    """A game of eight steps with rewards 1, 2, 3, …; a life is lost at the third step and, at once, at the sixth."""

    observation_space, action_space = Box(-9, 9, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._t += 1
        return np.full(1, self._t, np.float32), float(self._t), False, self._t == 8, {LIFE_LOST: self._t in (3, 6)}


gymnasium.register("Lives-v0", lambda **_: Lives())
SCORES = np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 1, 2])


def played(lives: bool, **env):
    values = {"env": {"id": "Lives-v0", **env}, "num_envs": 2, "num_shards": 1, "num_steps": 10}
    config = resolve(Config.model_validate({**values, "ppo": {"num_minibatches": 1, "gamma": 0.5, "gae_lambda": 1.0}}))
    description = replace(describe(config.env), lives=lives)
    plan = ShardPlan(2, 1)
    envs = make_envs(config.env, description, 0, plan.env_ids, pytest.fail)
    envs.reset()
    state = init_state(config, description, plan, torch.device("cpu"))
    rollout = Rollout.empty(10, envs, state.net, False)
    actor = state.policy.actor(plan, "batched")
    collect(state, envs, actor, action_noise(config, plan, state.net, 0), rollout)
    return config, plan, state, rollout


def test_a_lost_life_terminates_for_the_learner_and_the_game_goes_on():
    config, plan, state, rollout = played(lives=True)
    assert np.flatnonzero(rollout.terminated[:, 0]).tolist() == [2, 5]
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [7]
    assert np.flatnonzero(rollout.ended[:, 0]).tolist() == [7]
    assert list(final_of(rollout)) == [(7, 0), (7, 1)]
    assert rollout.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert finished_episodes(state, rollout, config, plan).tolist() == [[7, 0, 36, 8, 0], [7, 1, 36, 8, 0]]
    assert state.counter.lengths.tolist() == [2, 2]


def test_without_lives_nothing_terminates():
    _, _, _, rollout = played(lives=False)
    assert not rollout.terminated.any()
    np.testing.assert_array_equal(rollout.ended, rollout.truncated)


def test_no_value_flows_back_across_a_lost_life():
    config, plan, state, rollout = played(lives=True)
    returns = make_batch(state, rollout, plan, config, "batched").returns
    assert returns is not None
    per_step = returns.view(10, 2)[:, 0].numpy()
    np.testing.assert_allclose(per_step[:3], [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3], atol=1e-5)
    np.testing.assert_allclose(per_step[3:6], [4 + 0.5 * (5 + 0.5 * 6), 5 + 0.5 * 6, 6], atol=1e-5)


def test_the_learner_gets_shaped_rewards_and_the_metrics_scores():
    config, plan, state, rollout = played(lives=False, reward_scale=0.5, reward_clip=(0.0, 2.0))
    np.testing.assert_array_equal(rollout.scores[:, 1], SCORES)
    np.testing.assert_array_equal(rollout.rewards[:, 1], np.minimum(SCORES / 2, 2.0))
    assert finished_episodes(state, rollout, config, plan)[:, 2].tolist() == [36.0, 36.0]


def test_rewards_and_scores_are_one_array_where_nothing_is_shaped():
    _, _, _, rollout = played(lives=False)
    assert rollout.scores is rollout.rewards
    assert RewardShaping().identity
