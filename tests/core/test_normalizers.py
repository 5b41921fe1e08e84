import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep import reference
from lockstep.core.normalizers import (
    ObservationNormalizer,
    RewardNormalizer,
    RunningMoments,
    merge_shards,
    shard_moments,
)

SHAPES = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12), st.integers(1, 4))
SAMPLES = SHAPES.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(-1e3, 1e3, width=32)))


def merged(shards, into=None):
    moments = RunningMoments.empty(shards.shape[-1]) if into is None else into
    merge_shards(moments, np.stack([shard_moments(samples) for samples in shards]), shards.shape[1])
    return moments


def assert_moments_of(moments, samples):
    """Within 1e-12 of the samples' own size: of their largest value, and of the sum of their squares."""
    expected = reference.moments(samples)
    assert moments.count == len(samples)
    np.testing.assert_allclose(moments.mean, expected.mean, rtol=1e-12, atol=1e-12 * np.abs(samples).max())
    np.testing.assert_allclose(moments.m2, expected.m2, rtol=1e-12, atol=1e-12 * np.square(samples).sum())


# ---- moments


@given(SAMPLES)
def test_shards_merged_in_order_have_the_moments_of_the_whole(shards):
    assert_moments_of(merged(shards), shards.reshape(-1, shards.shape[-1]))


@given(SAMPLES, SAMPLES.map(len))
def test_iterations_add_up(shards, seed):
    more = np.random.default_rng(seed).normal(5.0, 3.0, shards.shape)
    both = merged(more, into=merged(shards))
    assert_moments_of(both, np.concatenate([shards, more]).reshape(-1, shards.shape[-1]))


def test_moments_of_ordinary_samples_to_twelve_digits():
    shards = np.random.default_rng(0).normal([3.0, -1.0, 0.0], [0.5, 20.0, 1.0], (8, 256, 3))
    moments, expected = merged(shards), reference.moments(shards.reshape(-1, 3))
    np.testing.assert_allclose(moments.mean, expected.mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(moments.m2, expected.m2, rtol=1e-12)
    np.testing.assert_allclose(moments.variance, shards.reshape(-1, 3).var(0), rtol=1e-12)
    without_one = merged(shards[:7])
    assert np.all(np.abs(without_one.m2 / expected.m2 - 1) > 1e-3)


@given(SAMPLES)
def test_merging_agrees_with_the_references_merging(shards):
    parts = [reference.moments(samples) for samples in shards]
    expected, moments = reference.merge_all(parts), merged(shards)
    np.testing.assert_allclose(moments.mean, expected.mean, rtol=1e-12, atol=1e-12 * np.abs(shards).max())
    np.testing.assert_allclose(moments.m2, expected.m2, rtol=1e-12, atol=1e-12 * np.square(shards).sum())


def test_ranks_that_merge_the_same_shards_get_the_same_bytes_however_shards_were_computed():
    shards = np.random.default_rng(1).normal(size=(8, 33, 5))
    alone = [shard_moments(samples) for samples in shards]
    strided = [shard_moments(np.asfortranarray(samples)) for samples in shards]
    assert np.array(alone).tobytes() == np.array(strided).tobytes()
    backwards = RunningMoments.empty(5)
    merge_shards(backwards, np.stack(alone[::-1]), 33)
    assert backwards.mean.tobytes() != merged(shards).mean.tobytes()  # the order matters, hence it is fixed


def test_nothing_merged_changes_nothing():
    moments = merged(np.random.default_rng(2).normal(size=(2, 4, 3)))
    before = (moments.count, moments.mean.copy(), moments.m2.copy())
    moments.merge(0, np.full(3, np.nan), np.full(3, np.nan))
    np.testing.assert_equal((moments.count, moments.mean, moments.m2), before)


def test_of_nothing_the_variance_is_one():
    np.testing.assert_array_equal(RunningMoments.empty(3).variance, np.ones(3))
    np.testing.assert_array_equal(merged(np.full((1, 4, 3), 7.0)).variance, np.zeros(3))


def test_samples_of_float32_are_summed_in_float64():
    samples = np.full((3, 1), 16_777_217.0)  # 2**24 + 1 is no float32
    assert shard_moments(samples)[0, 0] == 16_777_217.0
    as_float32 = np.array([[1e8], [1.0], [1.0]], np.float32)
    assert shard_moments(as_float32)[0, 0] == pytest.approx(100_000_002 / 3, rel=1e-15)


def test_moments_survive_their_arrays():
    moments = merged(np.random.default_rng(3).normal(size=(2, 5, 3)))
    arrays = moments.arrays()
    back = RunningMoments.from_arrays(arrays)
    assert (back.count, back.mean.tobytes(), back.m2.tobytes()) == (10, moments.mean.tobytes(), moments.m2.tobytes())
    back.merge(1, np.ones(3), np.zeros(3))
    back.mean += 1
    assert moments.count == 10
    np.testing.assert_array_equal(arrays["mean"], moments.mean)


# ---- observations


def test_observations_get_zero_mean_and_unit_variance():
    samples = np.random.default_rng(4).normal([100.0, -3.0], [25.0, 0.01], (4, 500, 2))
    normalize = ObservationNormalizer(merged(samples), clip=10.0)
    out = normalize(samples.reshape(-1, 2).astype(np.float32))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(out.std(0), 1, atol=1e-3)


def test_an_observation_by_hand():
    moments = RunningMoments(4.0, np.array([10.0, 0.0]), np.array([16.0, 0.0]))  # variances 4 and 0
    observations = np.array([[14.0, 0.0], [10.0, 1.0], [-1000.0, -1.0]], np.float32)
    kept = observations.copy()
    out = ObservationNormalizer(moments, clip=5.0)(observations)
    np.testing.assert_allclose(out, [[2, 0], [0, 5], [-5, -5]], rtol=1e-6)
    np.testing.assert_array_equal(observations, kept)


def test_statistics_are_frozen_until_they_are_not():
    moments = RunningMoments(4.0, np.array([1.0]), np.array([4.0]))
    normalize = ObservationNormalizer(moments, clip=10.0)
    observation = np.array([[3.0]], np.float32)
    before = normalize(observation)
    moments.merge(4, np.array([9.0]), np.array([1.0]))
    np.testing.assert_array_equal(normalize(observation), before)
    normalize.freeze()
    assert normalize(observation) < before


# ---- rewards


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 20), st.floats(0, 1))
def test_discounted_returns_are_the_references_and_know_no_seam(seed, num_envs, steps, gamma):
    random = np.random.default_rng(seed)
    rewards, done = random.normal(size=(steps, num_envs)), random.random((steps, num_envs)) < 0.2
    normalizer = RewardNormalizer(RunningMoments.empty(1), 10.0, gamma, num_envs)
    cut = int(random.integers(0, steps + 1))
    parts = [normalizer.discounted_returns(rewards[:cut], done[:cut])]
    parts.append(normalizer.discounted_returns(rewards[cut:], done[cut:]))
    expected, final = reference.discounted_returns(rewards, done, np.zeros(num_envs), gamma)
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    np.testing.assert_array_equal(normalizer.running, final)


def test_a_discounted_return_by_hand():
    normalizer = RewardNormalizer(RunningMoments.empty(1), 10.0, 0.5, 1)
    rewards, done = np.array([[1.0], [1.0], [4.0]]), np.array([[False], [True], [False]])
    np.testing.assert_array_equal(normalizer.discounted_returns(rewards, done), [[1.0], [1.5], [4.0]])
    assert normalizer.running == [4.0]


def test_rewards_are_divided_by_the_standard_deviation_and_clipped_but_not_centred():
    normalize = RewardNormalizer(RunningMoments(10.0, np.array([50.0]), np.array([40.0])), 3.0, 0.99, 1)
    np.testing.assert_allclose(normalize(np.array([0.0, 1.0, -4.0, 100.0, -100.0])), [0, 0.5, -2, 3, -3], rtol=1e-8)
