import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.episodes import WINDOW, EpisodeCounter, RecentEpisodes, finished_first_episodes


def rollouts(seed, count, steps, num_envs, done_probability):
    random = np.random.default_rng(seed)
    shape = (count, steps, num_envs)
    return random.normal(size=shape), random.random(shape) < done_probability, random.integers(-1, 2, shape)


def train(rewards, done, successes, bounds, seed=0):
    """The recent episodes after rollouts by ranks that own the environments between the bounds, in any order."""
    random = np.random.default_rng(seed)
    ranks = [range(first, last) for first, last in itertools.pairwise(bounds)]
    counters, recent = [EpisodeCounter(len(ids)) for ids in ranks], RecentEpisodes()
    for r, d, s in zip(rewards, done, successes, strict=True):
        parts = [c.finished(r[:, ids], d[:, ids], ids, s[:, ids]) for c, ids in zip(counters, ranks, strict=True)]
        recent.extend(np.concatenate([parts[i] for i in random.permutation(len(parts))]))
    return recent


# ---- one rank's counter


def test_episodes_by_hand():
    counter = EpisodeCounter(2)
    rewards = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    done = np.array([[False, True], [True, False], [False, True]])
    successes = np.array([[1, -1], [1, -1], [1, 0]])  # only what an episode's last step says counts
    rows = counter.finished(rewards, done, range(4, 6), successes)
    np.testing.assert_array_equal(rows, [[0, 5, 10, 1, -1], [1, 4, 3, 2, 1], [2, 5, 60, 2, 0]])
    np.testing.assert_array_equal(counter.returns, [4, 0])
    np.testing.assert_array_equal(counter.lengths, [1, 0])
    rows = counter.finished(np.array([[8.0, 1.0]]), np.array([[True, False]]), range(4, 6), np.array([[-1, 1]]))
    np.testing.assert_array_equal(rows, [[0, 4, 12, 2, -1]])


def test_without_an_ended_episode_there_are_no_rows():
    rows = EpisodeCounter(3).finished(np.ones((4, 3)), np.zeros((4, 3), bool), range(3), np.ones((4, 3)))
    assert rows.shape == (0, 5)


def test_a_forgotten_episode_counts_anew():
    counter = EpisodeCounter(2)
    counter.finished(np.ones((3, 2)), np.zeros((3, 2), bool), range(2), np.zeros((3, 2)))
    counter.forget(0)
    rows = counter.finished(np.ones((1, 2)), np.ones((1, 2), bool), range(2), np.zeros((1, 2)))
    np.testing.assert_array_equal(rows[:, 2:4], [[1, 1], [4, 4]])


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 12), st.floats(0, 1))
def test_rewards_and_steps_are_neither_lost_nor_counted_twice(seed, num_envs, steps, probability):
    rewards, done, successes = rollouts(seed, 3, steps, num_envs, probability)
    counter, ids = EpisodeCounter(num_envs), range(num_envs)
    rows = [counter.finished(r, d, ids, s) for r, d, s in zip(rewards, done, successes, strict=True)]
    rows = np.concatenate(rows)
    assert len(rows) == done.sum()
    assert rows[:, 3].sum() + counter.lengths.sum() == rewards.size
    np.testing.assert_allclose(rows[:, 2].sum() + counter.returns.sum(), rewards.sum(), rtol=1e-9, atol=1e-9)


# ---- the last hundred


@given(
    seed=st.integers(0, 2**32),
    num_envs=st.integers(1, 9),
    probability=st.sampled_from([0.02, 0.3, 0.9]),
    cuts=st.sets(st.integers(1, 8), max_size=5),
)
def test_the_last_hundred_do_not_depend_on_how_ranks_share_the_environments(seed, num_envs, probability, cuts):
    made = rollouts(seed, 4, 16, num_envs, probability)
    alone = train(*made, [0, num_envs])
    split = train(*made, [0, *sorted(c for c in cuts if c < num_envs), num_envs], seed)
    assert list(split.window) == list(alone.window)
    assert split.metrics() == alone.metrics()
    assert split == alone


@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.5]))
def test_the_last_hundred_are_the_newest_by_iteration_step_and_environment(seed, probability):
    rewards, done, successes = rollouts(seed, 3, 20, 6, probability)
    returns, lengths, episodes = np.zeros(6), np.zeros(6, int), []
    for r, d, s in zip(rewards, done, successes, strict=True):
        for t in range(20):
            for env in range(6):
                returns[env] += r[t, env]
                lengths[env] += 1
                if d[t, env]:
                    episodes.append((returns[env], lengths[env], s[t, env]))
                    returns[env], lengths[env] = 0, 0
    recent = train(rewards, done, successes, [0, 2, 4, 6], seed)
    assert list(recent.window) == episodes[-WINDOW:]
    assert recent.total == len(episodes)


def test_episodes_of_one_iteration_are_ordered_by_step_and_then_environment():
    recent = RecentEpisodes()
    recent.extend(np.array([[3, 0, 30.0, 1, 0], [1, 5, 15.0, 1, 0], [1, 2, 12.0, 1, 0]]))
    recent.extend(np.array([[0, 7, 7.0, 2, 0]]))
    assert [r for r, _, _ in recent.window] == [12, 15, 30, 7]


def test_window_and_total():
    recent = RecentEpisodes()
    for i in range(150):
        recent.extend(np.array([[0, 0, float(i), i + 1, 0]]))
    assert recent.total == 150
    assert recent.metrics() == {
        "rollout/episode_return_mean": 99.5,
        "rollout/episode_return_min": 50.0,
        "rollout/episode_return_max": 149.0,
        "rollout/episode_length_mean": 100.5,
        "rollout/episodes": 150,
    }


def test_before_the_first_episode_there_are_no_means():
    recent = RecentEpisodes()
    recent.extend(np.empty((0, 5)))
    metrics = recent.metrics()
    assert metrics.pop("rollout/episodes") == 0
    assert set(metrics.values()) == {None}


@given(st.integers(0, 2**32))
def test_every_digit_survives_json(seed):
    recent = train(*rollouts(seed, 2, 30, 4, 0.5), [0, 4])
    back = RecentEpisodes.from_json(json.loads(json.dumps(recent.to_json())))
    assert back == recent
    assert back.metrics() == recent.metrics()
    back.extend(np.array([[0, 0, 1.0, 1, 1]]))
    assert len(back.window) == min(WINDOW, len(recent.window) + 1)
    assert back != recent


def test_the_success_rate_is_of_the_episodes_that_say():
    recent = RecentEpisodes()
    recent.extend(np.array([[0, 0, 1.0, 1, 0]]))
    assert "rollout/success_rate" not in recent.metrics()
    recent.extend(np.array([[0, 0, 1.0, 1, -1]]))
    assert recent.metrics()["rollout/success_rate"] == 0.0
    recent.extend(np.array([[0, 0, 1.0, 1, 1], [0, 1, 1.0, 1, 1]]))
    assert recent.metrics()["rollout/success_rate"] == 2 / 3
    recent.extend(np.tile([[0, 2, 1.0, 1, -1]], (WINDOW, 1)))
    assert recent.metrics()["rollout/success_rate"] == 0.0


def test_a_checkpoint_without_successes_is_read():
    recent = RecentEpisodes.from_json({"window": [[1.5, 3], [2.5, 4]], "total": 7})
    assert list(recent.window) == [(1.5, 3, 0), (2.5, 4, 0)]
    assert recent.total == 7
    assert "rollout/success_rate" not in recent.metrics()


# ---- what environments say themselves


def test_means_are_over_the_episodes_of_the_window_that_state_a_metric():
    recent = RecentEpisodes()
    episodes = np.array([[3, 1, 9.0, 2, 0], [0, 5, 1.0, 2, 0], [3, 0, 4.0, 2, 0]])
    recent.extend(episodes, {(3, 1): {"b": 2.0}, (0, 5): {"a": 1.0, "b": 4.0}, (9, 9): {"c": 7.0}})
    metrics = recent.metrics()
    assert [name for name in metrics if name.startswith("rollout/metrics/")] == [
        "rollout/metrics/a",
        "rollout/metrics/b",
    ]
    assert (metrics["rollout/metrics/a"], metrics["rollout/metrics/b"]) == (1.0, 3.0)
    again = RecentEpisodes.from_json(json.loads(json.dumps(recent.to_json())))
    assert (again.metrics(), again.env_metrics) == (metrics, recent.env_metrics)
    recent.extend(np.tile([0.0, 0, 1, 1, 0], (WINDOW, 1)))
    assert not [name for name in recent.metrics() if name.startswith("rollout/metrics/")]
    assert "metrics" not in recent.to_json()
    older = recent.to_json()
    assert RecentEpisodes.from_json(older).env_metrics == recent.env_metrics


# ---- groups


def test_a_return_is_the_same_whichever_environments_are_beside_it():
    random = np.random.default_rng(0)
    scores, valid = random.normal(size=(100, 5)), np.ones((100, 5), bool)
    valid[40:, 1] = False
    none = np.zeros((100, 5))
    together = finished_first_episodes(valid, scores, none, range(5))
    for env in range(5):
        part = slice(env, env + 1)
        alone = finished_first_episodes(valid[:, part], scores[:, part], none[:, part], range(env, env + 1))
        np.testing.assert_array_equal(alone, together[together[:, 1] == env])
    np.testing.assert_array_equal(together[np.argsort(together[:, 1]), 2], np.where(valid, scores, 0.0).sum(0))


def test_a_first_episode_succeeds_by_what_its_last_step_said():
    """Not by what a later episode of the environment says, or an earlier step."""
    valid = np.array([[True, True, True], [True, False, True], [False, False, True]])
    successes = np.array([[-1, 1, -1], [1, -1, -1], [-1, -1, 0]])
    table = finished_first_episodes(valid, np.ones((3, 3)), successes, range(4, 7))
    assert [tuple(row[[0, 1, 3, 4]].astype(int)) for row in table] == [(0, 5, 1, 1), (1, 4, 2, 1), (2, 6, 3, 0)]
