"""The normalisers both engines share, against the float64 reference."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep import reference
from lockstep.core.normalizers import (
    EPSILON,
    ObservationNormalizer,
    RewardNormalizer,
    RunningMoments,
    merge_shards,
    shard_moments,
)


def floats(low=-10.0, high=10.0, width: Literal[32, 64] = 64):
    return st.floats(low, high, allow_subnormal=False, width=width)


@st.composite
def reward_sequences(draw):
    """Rewards and ends `[T, E]` of a few iterations, and a discount."""
    envs = draw(st.integers(1, 4))
    iterations = []
    for _ in range(draw(st.integers(1, 3))):
        shape = (draw(st.integers(1, 6)), envs)
        iterations.append((draw(arrays(np.float64, shape, elements=floats())), draw(arrays(np.bool_, shape))))
    return iterations, draw(floats(0.0, 1.0))


@given(reward_sequences())
def test_discounted_returns_are_the_references_across_iterations(sequence):
    iterations, gamma = sequence
    envs = iterations[0][0].shape[1]
    normalizer, current = RewardNormalizer(RunningMoments.empty(1), 10.0, gamma, envs), np.zeros(envs)
    for rewards, done in iterations:
        ours = normalizer.discounted_returns(rewards, done)
        expected, current = reference.discounted_returns(rewards, done, current, gamma)
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(normalizer.running, current, rtol=1e-12, atol=1e-12)


def test_a_discounted_return_starts_anew_after_an_end_and_only_there():
    normalizer = RewardNormalizer(RunningMoments.empty(1), 10.0, 0.5, 2)
    rewards, done = np.ones((3, 2)), np.array([[False, False], [True, False], [False, False]])
    ours = normalizer.discounted_returns(rewards, done)
    assert ours.T.tolist() == [[1.0, 1.5, 1.0], [1.0, 1.5, 1.75]]
    assert normalizer.running.tolist() == [1.0, 1.75]


@st.composite
def sample_sets(draw):
    """A few sets of samples `[n, size]`, some of them empty."""
    size, offset = draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 1e4]))
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    return [draw(arrays(np.float64, (n, size), elements=floats())) + offset for n in counts]


@given(sample_sets())
def test_running_moments_are_those_of_all_samples(sets):
    ours = RunningMoments.empty(sets[0].shape[1])
    for samples in sets:
        ours.merge(*reference.moments(samples))
    expected = reference.merge_all([reference.moments(samples) for samples in sets])
    whole = reference.moments(np.concatenate(sets))
    assert ours.count == expected.count == whole.count
    for theirs in (expected, whole):
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ours.m2, theirs.m2, rtol=1e-7, atol=1e-7)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_deltas_of_shards_are_merged_in_shard_order(shards, count, seed):
    samples = np.random.default_rng(seed).normal(3.0, 2.0, (shards, count, 2)).astype(np.float32)
    before = np.random.default_rng(seed + 1).normal(size=(7, 2))
    ours = RunningMoments(*reference.moments(before))
    merge_shards(ours, np.stack([shard_moments(part) for part in samples]), count)
    parts = [reference.moments(before), *(reference.moments(part) for part in samples)]
    expected = reference.merge_all(parts)
    assert ours.count == expected.count
    np.testing.assert_allclose(ours.mean, expected.mean, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(ours.m2, expected.m2, rtol=1e-12)


def test_merging_is_not_averaging():
    moments = RunningMoments(1.0, np.array([0.0]), np.array([0.0]))
    moments.merge(3, np.array([4.0]), np.array([6.0]))
    # Of {0} and three samples around 4: mean 3, M2 = 6 + 16 * 3 / 4.
    assert (moments.count, moments.mean.item(), moments.m2.item()) == (4.0, 3.0, 18.0)


def test_nothing_seen_yet_leaves_numbers_as_they_are():
    observations = np.array([[1.0, -2.0]], np.float32)
    np.testing.assert_allclose(ObservationNormalizer(RunningMoments.empty(2), 10.0)(observations), observations)
    assert RewardNormalizer(RunningMoments.empty(1), 10.0, 0.9, 1)(np.array([3.0])).item() == pytest.approx(3.0)


@given(arrays(np.float32, (5, 3), elements=floats(-100, 100, 32)), st.sampled_from([0.5, 10.0]))
def test_observations_are_centred_scaled_and_clipped(observations, clip):
    moments = RunningMoments(*reference.moments(np.random.default_rng(0).normal(2.0, 5.0, (64, 3))))
    ours = ObservationNormalizer(moments, clip)(observations)
    scaled = (observations - moments.mean) / np.sqrt(moments.m2 / moments.count + EPSILON)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, np.clip(scaled, -clip, clip), rtol=1e-5, atol=1e-5)


def test_observations_keep_their_frozen_statistics_until_the_next_freeze_and_are_not_changed_in_place():
    moments, observations = RunningMoments.empty(1), np.array([[6.0]], np.float32)
    normalizer = ObservationNormalizer(moments, 10.0)
    moments.merge(2, np.array([4.0]), np.array([2.0]))
    assert normalizer(observations).item() == pytest.approx(6.0)
    normalizer.freeze()
    assert normalizer(observations).item() == pytest.approx(2.0)
    assert observations.item() == 6.0


def test_rewards_are_scaled_but_not_centred_and_clipped():
    # Returns of variance 4 around 100: a reward of 6 is 3, not (6 - 100) / 2; 60 would be 30 and is cut at 10.
    normalizer = RewardNormalizer(RunningMoments(2.0, np.array([100.0]), np.array([8.0])), 10.0, 0.9, 1)
    assert normalizer(np.array([6.0, -6.0, 60.0, -60.0])).tolist() == pytest.approx([3.0, -3.0, 10.0, -10.0])
