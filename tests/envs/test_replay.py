import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.envs.restore import replay
from lockstep.envs.restore.replay import ReplayLog, row_hashes

LIKE = {"discrete": np.zeros(1, np.int64), "continuous": np.zeros((1, 3), np.float32)}


def random_rollout(random, steps, num_envs, kind, done_probability):
    shape = (steps, num_envs)
    actions = random.integers(0, 4, shape) if kind == "discrete" else random.normal(size=(*shape, 3)).astype(np.float32)
    hashes = random.integers(0, 2**64, shape, dtype=np.uint64)
    return actions, hashes, random.random(shape) < done_probability


class NaiveLog:
    """One step after the other, everything kept; what is over the limit is left out when it is asked for."""

    def __init__(self, num_envs, limit):
        self.limit, self.live = limit, [[] for _ in range(num_envs)]

    def extend(self, actions, hashes, done):
        for t in range(len(done)):
            for env, steps in enumerate(self.live):
                steps.append((actions[t, env].copy(), hashes[t, env]))
                if done[t, env]:
                    steps.clear()

    def kept(self, env):
        return self.live[env] if len(self.live[env]) <= self.limit else []


def assert_same(log, naive, like):
    for env, live in enumerate(naive.live):
        kept = naive.kept(env)
        assert log.length(env) == len(live)
        actions, hashes = log.actions(env, like), log.hashes(env)
        assert (actions.shape, actions.dtype) == ((len(kept), *like.shape[1:]), like.dtype)
        assert (hashes.shape, hashes.dtype) == ((len(kept),), np.uint64)
        if kept:
            np.testing.assert_array_equal(actions, np.stack([a for a, _ in kept]))
            np.testing.assert_array_equal(hashes, np.array([h for _, h in kept]))


# ---- the log


@given(
    seed=st.integers(0, 2**32),
    num_envs=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    kind=st.sampled_from(sorted(LIKE)),
    limit=st.sampled_from([0, 1, 5, 12, 1000]),
    probability=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_the_log_holds_exactly_the_live_episodes(seed, num_envs, lengths, kind, limit, probability):
    random = np.random.default_rng(seed)
    log, naive = ReplayLog(num_envs, limit), NaiveLog(num_envs, limit)
    for steps in lengths:
        rollout = random_rollout(random, steps, num_envs, kind, probability)
        log.extend(*rollout)
        naive.extend(*rollout)
        assert_same(log, naive, LIKE[kind])


@given(st.integers(0, 2**32), st.sampled_from([3, 8, 1000]), st.sampled_from([0.0, 0.1]))
def test_a_restored_log_goes_on_like_the_one_that_was_saved(seed, limit, probability):
    random = np.random.default_rng(seed)
    log, naive = ReplayLog(3, limit), NaiveLog(3, limit)
    for _ in range(2):
        rollout = random_rollout(random, 4, 3, "discrete", probability)
        log.extend(*rollout)
        naive.extend(*rollout)
    restored = ReplayLog(3, limit)
    for env in range(3):
        restored.restore(env, log.actions(env, LIKE["discrete"]), log.hashes(env), log.length(env))
    assert_same(restored, naive, LIKE["discrete"])
    rollout = random_rollout(random, 4, 3, "discrete", probability)
    restored.extend(*rollout)
    naive.extend(*rollout)
    assert_same(restored, naive, LIKE["discrete"])


def test_an_episode_of_just_the_limit_is_kept_and_one_step_more_is_not():
    log = ReplayLog(1, limit=3)
    for t in range(1, 6):
        log.extend(np.array([[t]]), np.array([[t]], np.uint64), np.array([[False]]))
        assert log.length(0) == t
        assert log.actions(0, LIKE["discrete"]).tolist() == (list(range(1, t + 1)) if t <= 3 else [])
    log.extend(np.array([[7], [8]]), np.array([[7], [8]], np.uint64), np.array([[True], [False]]))
    assert log.actions(0, LIKE["discrete"]).tolist() == [8]
    assert log.length(0) == 1


def test_the_log_keeps_copies():
    """Rollout buffers are written again in the next iteration."""
    log = ReplayLog(1, limit=10)
    actions, hashes = np.array([[1], [2]]), np.array([[3], [4]], np.uint64)
    log.extend(actions, hashes, np.zeros((2, 1), bool))
    actions[:], hashes[:] = 0, 0
    assert log.actions(0, LIKE["discrete"]).tolist() == [1, 2]
    assert log.hashes(0).tolist() == [3, 4]


def test_clear_forgets_one_environment():
    log = ReplayLog(2, limit=10)
    log.extend(np.array([[1, 2]]), np.array([[3, 4]], np.uint64), np.zeros((1, 2), bool))
    log.clear(0)
    assert (log.length(0), log.length(1)) == (0, 1)
    assert log.hashes(0).tolist() == []
    assert log.actions(1, LIKE["discrete"]).tolist() == [2]


# ---- hashes


def row(seed, size):
    random = np.random.default_rng(seed)
    return random.normal(size=(1, size)).astype(np.float32), random.normal(size=1)


def flipped(array, bit):
    raw = bytearray(array.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(0, 10_000))
def test_one_flipped_bit_of_an_observation_changes_the_hash(seed, size, bit):
    observation, reward = row(seed, size)
    other = flipped(observation, bit % (size * 32))
    assert row_hashes(observation, reward) == row_hashes(observation.copy(), reward.copy())
    assert row_hashes(other, reward) != row_hashes(observation, reward)


@given(st.integers(0, 2**32), st.integers(0, 63))
def test_one_flipped_bit_of_a_reward_changes_the_hash(seed, bit):
    observation, reward = row(seed, 4)
    assert row_hashes(observation, flipped(reward, bit)) != row_hashes(observation, reward)


@pytest.mark.parametrize("size", [2, 17, 4096, 4097, 9000])
def test_two_components_exchanged_change_the_hash(size):
    observation, reward = row(size, size)
    for i, j in ((0, 1), (0, size - 1), (size - 2, size - 1), (0, 4096 % size)):
        other = observation.copy()
        other[0, [i, j]] = other[0, [j, i]]
        assert (row_hashes(other, reward) == row_hashes(observation, reward)) == (i == j)


def test_zeros_of_either_sign_and_bits_of_nan_are_told_apart():
    reward = np.zeros(1)
    zero, minus_zero = np.zeros((1, 2), np.float32), -np.zeros((1, 2), np.float32)
    assert row_hashes(zero, reward) != row_hashes(minus_zero, reward)
    assert row_hashes(zero, reward) != row_hashes(zero, -reward)
    nan = np.full((1, 2), np.nan, np.float32)
    assert row_hashes(nan, reward) == row_hashes(nan.copy(), reward)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_a_rows_hash_does_not_depend_on_the_rows_beside_it(seed, steps, num_envs, size):
    """The check of a replay hashes one row at a time what a rollout hashed at once."""
    random = np.random.default_rng(seed)
    observations = random.normal(size=(steps, num_envs, size)).astype(np.float32)
    rewards = random.normal(size=(steps, num_envs))
    hashes = row_hashes(observations, rewards)
    assert (hashes.shape, hashes.dtype) == ((steps, num_envs), np.uint64)
    for t in range(steps):
        for env in range(num_envs):
            assert row_hashes(observations[t, env][None], rewards[t, env][None])[0] == hashes[t, env]
    strided = np.asfortranarray(observations)
    np.testing.assert_array_equal(row_hashes(strided, rewards), hashes)
    assert len(np.unique(hashes)) == hashes.size


@pytest.mark.parametrize("words", [1, 3, 20, 1000])
def test_hashes_do_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch, words):
    rng = np.random.default_rng(0)
    rows, rewards = rng.integers(0, 256, (5, 3, 28), dtype=np.uint8), rng.normal(size=(5, 3))
    whole = row_hashes(rows, rewards)
    monkeypatch.setattr(replay, "CACHED_WORDS", words)
    assert np.array_equal(row_hashes(rows, rewards), whole)
    assert np.array_equal(row_hashes(rows[1:], rewards[1:]), whole[1:])
    assert len(np.unique(whole)) == 15
