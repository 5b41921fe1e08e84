"""The JAX engine's GAE, group advantages and moments against the float64 reference, inside a compiled program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import reference
from lockstep.jax_engine.advantages import counted_moments, gae, group_advantages, merge_counts, moments
from lockstep.jax_engine.statistics import explained_variance

STEPS, ENVS = 9, 3
SHARDS, PARTS, ROWS = 4, 2, 5
compiled_gae = jax.jit(gae)
compiled_moments = jax.jit(moments)
compiled_union = jax.jit(lambda x, valid: merge_counts(counted_moments(x, valid)))
compiled_groups = jax.jit(group_advantages, static_argnums=2)


@st.composite
def rollouts(draw):
    """Rewards, values, next values ``[T, E]``, and where episodes terminate or are truncated."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    often, scale = draw(st.sampled_from([0.0, 0.3, 0.9])), draw(st.sampled_from([1.0, 100.0]))
    numbers = [scale * rng.normal(size=(STEPS, ENVS)) for _ in range(3)]
    return (*numbers, rng.random((STEPS, ENVS)) < often, rng.random((STEPS, ENVS)) < often)


def engine_gae(rollout, gamma, gae_lambda, dtype: type = np.float64):
    rewards, values, bootstrap_values, terminated, truncated = rollout
    numbers = [np.asarray(x).astype(dtype) for x in (rewards, values, bootstrap_values)]
    with jax.enable_x64(dtype is np.float64):
        out = compiled_gae(*numbers, terminated, terminated | truncated, dtype(gamma), dtype(gae_lambda))
        assert all(x.dtype == dtype for x in out)
        return [np.asarray(x) for x in out]


fractions = st.floats(0.0, 1.0, allow_subnormal=False)


@given(rollouts(), fractions, fractions)
def test_gae_is_the_references(rollout, gamma, gae_lambda):
    expected = reference.gae(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    for ours, theirs in zip(engine_gae(rollout, gamma, gae_lambda), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


@given(rollouts(), fractions, fractions)
def test_gae_in_float32_loses_no_more_than_rounding(rollout, gamma, gae_lambda):
    rollout = (*(x.astype(np.float32) for x in rollout[:3]), *rollout[3:])
    expected, _ = reference.gae(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    ours, _ = engine_gae(rollout, gamma, gae_lambda, np.float32)
    scale = max(1.0, float(np.abs(np.stack(rollout[:3])).max()))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * scale)


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
    assert engine_gae(rollout, 0.5, 0.5)[0].item() == -1.0


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_gae_lets_no_nan_of_the_next_episode_back_into_the_last_one(end):
    flags = [np.array([[end == name], [False]]) for name in ("terminated", "truncated")]
    rollout = (np.array([[1.0], [math.nan]]), np.array([[2.0], [1.0]]), np.array([[4.0], [1.0]]), *flags)
    advantages, _ = engine_gae(rollout, 0.5, 0.5)
    assert advantages[0].item() == (1.0 if end == "truncated" else -1.0)
    assert math.isnan(advantages[1].item())


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([1.0, 1e4]))
def test_group_advantages_are_the_references(seed, normalize_std, scale):
    returns = (scale * np.random.default_rng(seed).normal(size=(3, 4))).astype(np.float32)
    ours = compiled_groups(returns, np.abs(returns), normalize_std)
    expected = reference.group_advantages(returns.reshape(-1), 4, eps=1e-8, scale=normalize_std).reshape(3, 4)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("worst", [np.nan, np.inf])
def test_a_return_that_is_no_number_shows_in_the_advantages(worst):
    """Else it would show in no loss either, and its group would be left out without a word."""
    returns = np.array([[1.0, 2.0, worst], [1.0, 2.0, 3.0]])
    bad, good = np.asarray(compiled_groups(returns, np.abs(returns), True))
    assert np.isnan(bad).any()
    assert np.isfinite(good).all()


def test_equal_returns_of_a_group_have_no_advantage():
    sevens = np.full((2, 3), 7.0, np.float32)
    assert np.asarray(compiled_groups(sevens, sevens, True)).tolist() == [[0.0] * 3] * 2


def test_returns_that_differ_by_the_rounding_of_their_rewards_only_have_no_advantage():
    rewards = np.array([[[10.1, 20.2, 0.0], [30.3, 0.0, 0.0]], [[0.1, 0.2, 0.7], [0.3, 0.7, 0.0]]], np.float32)
    returns, magnitudes = (x.astype(np.float64).sum(-1) for x in (rewards, np.abs(rewards)))
    assert (returns[:, 0] != returns[:, 1]).all()
    assert np.asarray(compiled_groups(returns, magnitudes, True)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    apart = np.array([[30.3, 30.301]])
    np.testing.assert_allclose(compiled_groups(apart, apart, True), [[-1.0, 1.0]], rtol=1e-4)


@st.composite
def equal_parts(draw):
    """float32 ``[SHARDS, PARTS, ROWS]``, far from 0 or not, and what of it counts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(size=(SHARDS, PARTS, ROWS)) + draw(st.sampled_from([0.0, 1e4]))
    return values.astype(np.float32), (rng.random(values.shape) < draw(st.sampled_from([0.2, 0.8]))).astype(np.float32)


@given(equal_parts())
def test_moments_of_float32_numbers_are_the_references_in_float64(drawn):
    values, _ = drawn
    ours = compiled_moments(values)
    assert ours.dtype == np.float64
    for shard, samples in zip(np.asarray(ours), values, strict=True):
        expected = reference.moments(samples.T)
        np.testing.assert_allclose(shard[:, 0], expected.mean, rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(shard[:, 1], expected.m2, rtol=1e-10, atol=1e-12)


@given(equal_parts(), st.booleans())
def test_shards_merge_to_the_mean_and_deviation_of_their_union(drawn, everything):
    values, valid = drawn
    spoilt = values if everything else np.where(valid > 0, values, np.nan)
    count, mean, std = compiled_union(spoilt, None if everything else valid)
    assert count.dtype == mean.dtype == std.dtype == np.float64
    for part in range(PARTS):
        chosen = valid[:, part] > 0 if not everything else np.ones((SHARDS, ROWS), bool)
        union = values[:, part][chosen].astype(np.float64)
        assert float(count[part]) == len(union)
        assert float(mean[part]) == pytest.approx(union.mean() if len(union) else 0.0, rel=1e-14, abs=1e-14)
        assert float(std[part]) == pytest.approx(union.std() if len(union) else 0.0, rel=1e-8, abs=1e-10)


def test_merging_by_hand_is_not_averaging_the_shards():
    # {0, 2} and {10, 14}: means 1 and 12, deviations 1 and 2; of the union mean 6.5, M2 2 + 8 + 11^2 = 131.
    _, mean, std = jax.jit(lambda x: merge_counts(counted_moments(x, None)))(
        np.array([[[0, 2]], [[10, 14]]], np.float32)
    )
    assert mean.item() == 6.5
    assert std.item() == pytest.approx(math.sqrt(131 / 4), rel=1e-14)
    assert std.item() != pytest.approx((1 + 2) / 2)


def test_float32_would_have_lost_digits():
    """The negative of the float64 tests: these numbers' squares need more than float32's 24 bits."""
    values = (1e4 + 3 * np.random.default_rng(0).normal(size=256)).astype(np.float32)
    expected = reference.moments(values)
    assert compiled_moments(values).tolist() == pytest.approx([expected.mean.item(), expected.m2.item()], rel=1e-14)
    single = float(jax.numpy.square(values - values.mean()).sum())
    assert single != pytest.approx(expected.m2.item(), rel=1e-14)


def test_returns_that_vary_by_rounding_only_are_taken_as_equal():
    values = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    returns = (np.float32(1.0) - values) + values
    assert np.ptp(returns) > 0.0

    def explained(returns):
        with jax.enable_x64(True):
            both = moments(jnp.asarray(np.stack([returns, returns - values], 1)))
            return explained_variance(jnp.concatenate([jnp.full((1, 2, 1), 64.0, jnp.float64), both], -1)).item()

    assert math.isnan(explained(returns))
    returns[0, 0] += np.float32(1e-4)
    assert not math.isnan(explained(returns))
