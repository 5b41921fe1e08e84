"""Collecting: keyed noise, and that a rollout holds what the environments gave."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from small_runs import ScriptedEnvs, actions_of, described, final_of, plan_of, small_config, small_state, vectors

from lockstep.config.run import Config
from lockstep.core.normalizers import RunningMoments
from lockstep.core.shards import ShardPlan
from lockstep.core.spaces import ActionLayout, observation_layout
from lockstep.envs.gymnasium.random_policy import (
    allowed_actions,
    draw_replacements,
    random_actions,
    random_replacements,
)
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog, row_hashes
from lockstep.torch_engine.rollout import (
    Rollout,
    action_noise,
    collect,
    collect_random,
    record_replay,
)
from lockstep.torch_engine.state import TrainState, make_net

HEADS = pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "continuous"])


# --- Random numbers ---------------------------------------------------------------------------------------------------


@HEADS
@pytest.mark.parametrize("draw", ["noise", "random actions", "replacements"])
def test_a_ranks_draws_are_its_slice_of_the_worlds(draw, discrete):
    config, description = small_config(num_shards=4), described(discrete)

    def drawn(plan: ShardPlan) -> np.ndarray:
        if draw == "noise":
            return action_noise(
                config, plan, make_net(config, description.observation, description.action), iteration=2
            )
        if draw == "replacements":
            return random_replacements(config, plan, ActionLayout("multi_discrete", (2, 3), (0, 0), (2,)))
        return random_actions(config, plan, description.action)

    world = drawn(plan_of(config))
    assert world.shape[:2] == (4, 8)
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            plan = plan_of(config, world_size, rank)
            np.testing.assert_array_equal(drawn(plan), world[:, plan.env_ids.start : plan.env_ids.stop])
    assert not np.array_equal(world[:, :2], world[:, 2:4])


def test_noise_differs_between_iterations_and_seeds_and_nothing_else():
    config = small_config()
    net = make_net(config, vectors(4), actions_of(True, 3))
    first = action_noise(config, plan_of(config), net, 0)
    np.testing.assert_array_equal(action_noise(config, plan_of(config), net, 0), first)
    assert not np.array_equal(action_noise(config, plan_of(config), net, 1), first)
    assert not np.array_equal(action_noise(config.model_copy(update={"seed": 1}), plan_of(config), net, 0), first)
    assert first.dtype == np.float32


def test_random_actions_fill_their_bounds_and_are_normal_where_there_are_none():
    low, high = (-2.0, 0.0, -np.inf, 1.0), (3.0, 1.0, np.inf, np.inf)
    config = small_config(num_steps=500)
    actions = random_actions(config, plan_of(config), ActionLayout("continuous", shape=(4,), low=low, high=high))
    assert (actions.shape, actions.dtype) == ((500, 8, 4), np.float32)
    flat = actions.reshape(-1, 4)
    np.testing.assert_allclose(flat[:, :2].min(0), [-2.0, 0.0], atol=0.02)
    np.testing.assert_allclose(flat[:, :2].max(0), [3.0, 1.0], atol=0.02)
    assert (flat[:, :2] >= low[:2]).all()
    assert (flat[:, :2] <= high[:2]).all()
    np.testing.assert_allclose(flat[:, 2:].std(0), 1.0, atol=0.1)
    np.testing.assert_allclose(flat[:, 2:].mean(0), 0.0, atol=0.1)


def test_random_discrete_actions_are_all_of_them_equally():
    config = small_config(num_steps=500)
    actions = random_actions(config, plan_of(config), actions_of(True, 5))
    assert actions.dtype == np.int64
    np.testing.assert_allclose(np.bincount(actions.ravel(), minlength=5) / actions.size, 0.2, atol=0.03)


@pytest.mark.parametrize(
    "action",
    [actions_of(True, 4), ActionLayout("multi_discrete", (3, 1, 4), (0, 0, 0), (3,))],
    ids=["discrete", "multi-discrete"],
)
def test_random_actions_respect_a_mask_and_stay_where_they_may(action):
    rng = np.random.default_rng(0)
    masks = rng.random((200, action.outputs)) < 0.5
    starts = np.cumsum([0, *action.choices[:-1]])
    masks[:, starts] = True  # at least one choice of each index
    space = Box(-1.0, 1.0, (2,), np.float32)
    layout = observation_layout(space, mask_size=action.outputs)
    rows = np.stack([layout.encode(np.zeros(2), mask) for mask in masks])
    drawn = np.stack([rng.integers(0, count, 200) for count in action.choices], -1).reshape(200, *action.row_shape)
    replacements = draw_replacements(rng, action, (200,))
    taken = allowed_actions(layout, action, rows, drawn, replacements)

    def permitted(actions: np.ndarray) -> np.ndarray:
        return masks[np.arange(200)[:, None], starts + actions.reshape(200, -1)]

    assert (taken.shape, taken.dtype) == (drawn.shape, np.int64)
    assert permitted(taken).all()
    assert not permitted(drawn).all()
    kept = permitted(drawn)
    assert np.array_equal(taken.reshape(200, -1)[kept], drawn.reshape(200, -1)[kept])
    assert allowed_actions(observation_layout(space), action, rows, drawn, replacements) is drawn


# --- Collecting -------------------------------------------------------------------------------------------------------

ENDS = {(0, 1): "terminated", (1, 2): "truncated", (2, 1): "both", (3, 5): "truncated", (0, 5): "truncated"}


def collected(config: Config, normalised: bool = False) -> tuple[TrainState, ScriptedEnvs, Rollout]:
    plan, envs = plan_of(config), ScriptedEnvs(range(8), ENDS)
    state = small_state(config, envs.description)
    if normalised:
        assert state.observation_normalizer is not None
        state.observation_normalizer.moments = RunningMoments(1.0, np.array([1.0, 2.0]), np.array([4.0, 0.25]))
        state.observation_normalizer.freeze()
    rollout = Rollout.empty(config.num_steps, envs, state.net, normalised)
    envs.reset()
    noise = action_noise(config, plan, state.net, 0)
    collect(state, envs, state.policy.actor(plan, "batched"), noise, rollout)
    return state, envs, rollout


def expected_observations() -> np.ndarray:
    """`[5, 8, 2]`: `[env, t]`, and `[env, -t]` after an end in step t."""
    out = np.zeros((5, 8, 2), np.float32)
    out[..., 0], out[..., 1] = np.arange(8), np.arange(5)[:, None]
    for t, env in ENDS:
        out[t + 1, env, 1] = -t
    return out


def test_a_rollout_holds_what_the_environments_gave():
    _, envs, rollout = collected(small_config())
    np.testing.assert_array_equal(rollout.observations, expected_observations())
    np.testing.assert_array_equal(rollout.raw, expected_observations()[:-1])
    np.testing.assert_array_equal(rollout.rewards, 10.0 * np.arange(8) + np.arange(4)[:, None])
    np.testing.assert_array_equal(rollout.actions, envs.taken)
    assert rollout.rewards.dtype == np.float64


def test_an_end_is_one_of_the_two_and_only_truncated_ones_keep_their_final_observation():
    _, _, rollout = collected(small_config())
    found = {(int(t), int(e)) for t, e in np.argwhere(rollout.done)}
    assert found == set(ENDS)
    assert {(int(t), int(e)) for t, e in np.argwhere(rollout.terminated)} == {(0, 1), (2, 1)}
    assert {(int(t), int(e)) for t, e in np.argwhere(rollout.truncated)} == {(1, 2), (3, 5), (0, 5)}
    assert {where: x.tolist() for where, x in final_of(rollout).items()} == {
        (0, 5): [5, 1000],
        (1, 2): [2, 1001],
        (3, 5): [5, 1003],
    }


def test_a_rollout_keeps_copies_of_buffers_that_environments_use_again():
    _, envs, rollout = collected(small_config())
    before = {
        f.name: np.copy(getattr(rollout, f.name)) for f in dataclasses.fields(rollout) if f.name != "final_missing"
    }
    for name in ("observations", "final_observations", "rewards", "actions"):
        getattr(envs.buffers, name)[:] = 99
    for name in ("terminated", "truncated"):
        getattr(envs.buffers, name)[:] = True
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(rollout, name), array, err_msg=name)


def test_networks_see_normalised_observations_and_statistics_the_raw_ones():
    # Means (1, 2), variances (4, 1/4): normalised is ((e - 1) / 2, (t - 2) * 2), within 10.
    _, _, rollout = collected(small_config(normalize={"observations": True}), normalised=True)
    raw = expected_observations()
    expected = np.clip((raw - [1.0, 2.0]) / [2.0, 0.5], -10, 10)
    np.testing.assert_array_equal(rollout.raw, raw[:-1])
    np.testing.assert_allclose(rollout.observations, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final_of(rollout)[1, 2], [0.5, 10.0], rtol=1e-5)


def test_a_second_rollout_forgets_the_first_ones_final_observations():
    config = small_config()
    state, envs, rollout = collected(config)
    noise = action_noise(config, plan_of(config), state.net, 1)
    collect(state, envs, state.policy.actor(plan_of(config), "batched"), noise, rollout)
    assert len(rollout.final) == 0
    np.testing.assert_array_equal(rollout.observations[0], expected_observations()[-1])


@HEADS
@pytest.mark.parametrize(("mode", "size"), [("batched", 4), ("loop", 4), ("loop", 11)])
def test_actions_of_a_rank_are_its_slice_of_the_worlds_bit_for_bit(mode, size, discrete):
    """Step after step from a rollout's own rows, which lie anywhere in memory."""
    config = small_config(num_shards=4, network={"hidden_sizes": (64, 64)})
    state = small_state(config, described(discrete, size))
    observations = np.random.default_rng(0).normal(size=(6, 8, size)).astype(np.float32)
    noise = np.random.default_rng(1).normal(size=(6, 8, 3)).astype(np.float32)

    def actions(plan: ShardPlan) -> np.ndarray:
        ids = slice(plan.env_ids.start, plan.env_ids.stop)
        actor, mine, drawn = state.policy.actor(plan, mode), observations[:, ids].copy(), noise[:, ids].copy()
        with torch.inference_mode():
            return np.stack([actor(mine[t], drawn[t]) for t in range(6)])

    world = actions(plan_of(config))
    assert world.shape == ((6, 8) if discrete else (6, 8, 3))
    for world_size in (2, 3, 4):
        ranks = [actions(plan_of(config, world_size, rank)) for rank in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(ranks, 1), world)


def test_the_noise_decides_the_action_and_each_environment_has_its_own():
    config = small_config()
    state = small_state(config, described())
    actor, x = state.policy.actor(plan_of(config), "batched"), np.zeros((8, 4), np.float32)
    noise = np.zeros((8, 3), np.float32)
    noise[np.arange(8), np.arange(8) % 3] = 100.0
    assert actor(x, noise).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


# --- Random rollouts and replays --------------------------------------------------------------------------------------


def test_a_random_rollout_takes_keyed_actions_and_leaves_fresh_episodes():
    config = small_config(env="lockstep/CartPole-v1", num_steps=40)
    description, plan = described(actions=2), plan_of(config)
    description = dataclasses.replace(description, id=config.env.id, is_array=True, max_episode_steps=15)
    envs = make_envs(config.env, description, config.seed, plan.env_ids, pytest.fail)
    envs.reset()
    first, net = envs.buffers.observations.copy(), make_net(config, description.observation, description.action)
    rollout = Rollout.empty(40, envs, net, normalized=True)
    collect_random(config, plan, envs, rollout)
    np.testing.assert_array_equal(rollout.raw[0], first)
    assert rollout.done.any(0).all()
    assert not (rollout.terminated & rollout.truncated).any()
    episodes = envs.buffers.episodes.tolist()
    assert episodes == (rollout.done.sum(0) + 1).tolist()  # the live one was broken off
    left = envs.buffers.observations.copy()
    again = make_envs(config.env, description, config.seed, plan.env_ids, pytest.fail)
    again.buffers.episodes[:] = episodes
    again.reset()
    np.testing.assert_array_equal(again.buffers.observations, left)


def test_a_replay_holds_the_live_episodes_actions_and_what_they_led_to():
    _, envs, rollout = collected(small_config())
    replay = ReplayLog(8, limit=100)
    record_replay(replay, envs, rollout)
    # Environment 0 never ended; 1 ended last in step 2, 2 in step 1, 5 in step 3.
    assert [replay.length(env) for env in range(8)] == [4, 1, 2, 4, 4, 0, 4, 4]
    followed = expected_observations()[1:]
    for env, first in ((0, 0), (1, 3), (2, 2)):
        np.testing.assert_array_equal(replay.actions(env, envs.buffers.actions), rollout.actions[first:, env])
        expected = row_hashes(followed[first:, env], rollout.rewards[first:, env])
        np.testing.assert_array_equal(replay.hashes(env), expected)
