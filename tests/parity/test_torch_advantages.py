"""The PyTorch engine's GAE, moments and explained variance against the float64 reference."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep import reference
from lockstep.torch_engine.advantages import _merge, counted_moments, gae, group_advantages, merge_counts, moments
from lockstep.torch_engine.statistics import explained_variance

KINDS = ("runs on", "terminated", "truncated", "both")


def floats(low=-10.0, high=10.0, width: Literal[32, 64] = 64):
    return st.floats(low, high, allow_subnormal=False, width=width)


@st.composite
def rollouts(draw):
    """Rewards, values, next values `[T, E]`, and at every step one of :data:`KINDS`."""
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    numbers = [draw(arrays(np.float64, shape, elements=floats())) for _ in range(3)]
    kinds = draw(arrays(np.int64, shape, elements=st.integers(0, len(KINDS) - 1)))
    return (*numbers, np.isin(kinds, (1, 3)), np.isin(kinds, (2, 3)))


def engine_gae(rollout, gamma, gae_lambda, dtype=torch.float64):
    rewards, values, bootstrap_values, terminated, truncated = rollout
    columns = (rewards, values, bootstrap_values, terminated, terminated | truncated)
    tensors = [torch.from_numpy(np.asarray(x)).to(dtype) for x in columns]
    return gae(*tensors, gamma=gamma, gae_lambda=gae_lambda)


@given(rollouts(), floats(0.0, 1.0), floats(0.0, 1.0))
def test_gae_is_the_references(rollout, gamma, gae_lambda):
    expected = reference.gae(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    for ours, theirs in zip(engine_gae(rollout, gamma, gae_lambda), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12, atol=1e-12)


@given(rollouts(), floats(0.0, 1.0), floats(0.0, 1.0))
def test_gae_in_float32_loses_no_more_than_rounding(rollout, gamma, gae_lambda):
    rollout = (*(x.astype(np.float32) for x in rollout[:3]), *rollout[3:])
    expected, _ = reference.gae(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    ours, _ = engine_gae(rollout, gamma, gae_lambda, torch.float32)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4)  # sums of up to 12 numbers up to 30


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        # gamma = lambda = 1/2; delta_1 = 4 - 1 = 3 (no bootstrap beyond the end).
        ("runs on", 1 + 4 / 2 - 2 + 3 / 4),
        ("terminated", 1 + 0 - 2),
        ("truncated", 1 + 4 / 2 - 2),
        ("both", 1 + 0 - 2),
    ],
)
def test_an_end_by_hand(kind, first):
    flags = {"terminated": kind in ("terminated", "both"), "truncated": kind in ("truncated", "both")}
    terminated, truncated = (np.array([[flags[name]], [name == "terminated"]]) for name in ("terminated", "truncated"))
    numbers = (np.array([[1.0], [4.0]]), np.array([[2.0], [1.0]]), np.array([[4.0], [100.0]]))
    advantages, returns = engine_gae((*numbers, terminated, truncated), 0.5, 0.5)
    assert advantages[:, 0].tolist() == [first, 3.0]
    assert returns[:, 0].tolist() == [first + 2.0, 4.0]


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_gae_ignores_what_would_have_followed_a_termination(nothing):
    flags = np.ones((1, 1), bool), np.zeros((1, 1), bool)
    rollout = (np.ones((1, 1)), np.full((1, 1), 2.0), np.full((1, 1), nothing), *flags)
    expected, _ = reference.gae(*rollout, gamma=0.5, gae_lambda=0.5)
    advantages, _ = engine_gae(rollout, 0.5, 0.5)
    assert advantages.item() == expected.item() == -1.0


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_gae_lets_no_nan_of_the_next_episode_back_into_the_last_one(end):
    flags = [np.array([[end == name], [False]]) for name in ("terminated", "truncated")]
    rollout = (np.array([[1.0], [math.nan]]), np.array([[2.0], [1.0]]), np.array([[4.0], [1.0]]), *flags)
    expected, _ = reference.gae(*rollout, gamma=0.5, gae_lambda=0.5)
    advantages, _ = engine_gae(rollout, 0.5, 0.5)
    assert advantages[0].item() == expected[0].item() == (1.0 if end == "truncated" else -1.0)
    assert math.isnan(advantages[1].item())


@st.composite
def equal_parts(draw):
    """`[num_shards, n, k]`: n samples of k quantities in each shard, far from 0 or not."""
    shape = (2 ** draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 3)))
    return draw(arrays(np.float64, shape, elements=floats())) + draw(st.sampled_from([0.0, 1e6]))


@given(equal_parts())
def test_moments_of_a_shard_are_the_references(parts):
    ours = moments(torch.from_numpy(parts).transpose(1, 2)).numpy()
    for shard, samples in zip(ours, parts, strict=True):
        expected = reference.moments(samples)
        np.testing.assert_allclose(shard[:, 0], expected.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(shard[:, 1], expected.m2, rtol=1e-7, atol=1e-7)


@given(equal_parts())
def test_shards_merge_to_the_mean_and_deviation_of_their_union(parts):
    count, mean, std = merge_counts(counted_moments(torch.from_numpy(parts).transpose(1, 2), None))
    assert (count == parts.shape[0] * parts.shape[1]).all()
    expected = reference.merge_all([reference.moments(samples) for samples in parts])
    whole = parts.reshape(-1, parts.shape[2])
    np.testing.assert_allclose(mean.numpy(), expected.mean, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(std.numpy(), np.sqrt(expected.m2 / expected.count), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(std.numpy(), whole.std(0), rtol=1e-6, atol=1e-6)


def test_arrays_are_merged_to_the_bits_of_tensors():
    drawn = np.random.default_rng(0).standard_normal((5, 50_000, 3))
    parts = torch.from_numpy(np.abs(drawn) * [100.0, 1.0, 10.0] // [1.0, 1e-9, 1e-9])
    count, mean, variance = _merge(parts, torch.clamp)
    for ours, expected in zip(merge_counts(parts), (count, mean, variance.sqrt()), strict=True):
        assert torch.equal(ours, expected)


def test_merging_by_hand_is_not_averaging_the_shards():
    # {0, 2} and {10, 14}: means 1 and 12, deviations 1 and 2; of the union mean 6.5, M2 2 + 8 + 11^2 = 131.
    parts = torch.tensor([[[2.0, 1.0, 2.0]], [[2.0, 12.0, 8.0]]], dtype=torch.float64)
    _, mean, std = merge_counts(parts)
    assert mean.item() == 6.5
    assert std.item() == pytest.approx(math.sqrt(131 / 4))
    assert std.item() != pytest.approx((1 + 2) / 2)


def test_moments_are_taken_in_float64():
    values = np.float32(1e4) + np.arange(256, dtype=np.float32)  # its squares need more than float32's 24 bits
    ours = moments(torch.from_numpy(values))
    expected = reference.moments(values)
    assert ours.dtype == torch.float64
    assert ours.tolist() == pytest.approx([expected.mean.item(), expected.m2.item()], rel=1e-14)


def fit(returns, values):
    """What the shards share about the critic's fit: float64 `[num_shards, 2, 2]`."""
    shards = zip(torch.from_numpy(returns), torch.from_numpy(values), strict=True)
    return torch.stack([torch.stack([moments(r), moments(r.double() - v.double())]) for r, v in shards])


@given(st.data(), st.sampled_from([1, 2, 8]))
def test_explained_variance_is_the_references(data, num_shards):
    shape = (num_shards, data.draw(st.integers(2, 6)))
    returns, values = (data.draw(arrays(np.float32, shape, elements=floats(width=32))) for _ in range(2))
    assume(np.ptp(returns) > max(1e-3, 1e-5 * np.abs(returns).max(), 1e-5 * np.abs(returns - values).max()))
    ours = explained_variance(fit(returns, values), np.full(num_shards, shape[1]))
    assert ours == pytest.approx(reference.explained_variance(values, returns), rel=1e-6, abs=1e-6)


@given(floats(width=32), st.integers(1, 9))
def test_explained_variance_of_equal_returns_is_none_where_the_reference_says_nan(value, size):
    returns, values = np.full((4, size), value, np.float32), np.arange(4 * size, dtype=np.float32).reshape(4, size)
    assert math.isnan(reference.explained_variance(values, returns))
    assert explained_variance(fit(returns, values), np.full(4, size)) is None


def test_returns_that_vary_by_rounding_only_are_taken_as_equal():
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    returns = (np.float32(1.0) - values) + values
    assert np.ptp(returns) > 0.0
    assert explained_variance(fit(returns, values), np.full(4, 64)) is None
    returns[0, 0] += np.float32(1e-4)
    assert explained_variance(fit(returns, values), np.full(4, 64)) is not None


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_a_return_that_is_no_number_shows_in_the_advantages(worst):
    """Else it would show in no loss either, and its group would be left out without a word."""
    returns = torch.tensor([[1.0, 2.0, worst], [1.0, 2.0, 3.0]], dtype=torch.float64)
    bad, good = group_advantages(returns, returns.abs(), True)
    assert bad.isnan().any()
    assert good.isfinite().all()


def test_returns_of_a_group_that_differ_by_the_rounding_of_their_rewards_only_have_no_advantage():
    rewards = np.array([[[10.1, 20.2, 0.0], [30.3, 0.0, 0.0]], [[0.1, 0.2, 0.7], [0.3, 0.7, 0.0]]], np.float32)
    returns, magnitudes = (torch.from_numpy(x.astype(np.float64).sum(-1)) for x in (rewards, np.abs(rewards)))
    assert (returns[:, 0] != returns[:, 1]).all()
    assert group_advantages(returns, magnitudes, True).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    apart = torch.tensor([[30.3, 30.301]], dtype=torch.float64)
    assert group_advantages(apart, apart, True).tolist() == [
        [pytest.approx(-1.0, rel=1e-4), pytest.approx(1.0, rel=1e-4)]
    ]
