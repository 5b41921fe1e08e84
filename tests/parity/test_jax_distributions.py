"""The JAX engine's action distributions against the float64 reference."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium.spaces import Box
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp
from net_cases import CASES

from lockstep import reference
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout, observation_layout
from lockstep.jax_engine.nets import distributions
from lockstep.jax_engine.nets.nets import PolicyNet

ROWS, CHOICES, COMPONENTS = 4, 5, 3
DRAWS = 20_000
VECTOR = ObservationLayout((Leaf("", "vector", (3,)),))
DISCRETE = PolicyNet(VECTOR, ActionLayout("discrete", (CHOICES,), (0,)))
GAUSSIAN = PolicyNet(VECTOR, ActionLayout("continuous", shape=(3,), low=(-1.0,) * 3, high=(1.0,) * 3))
seeds = st.integers(0, 2**32 - 1)


@lru_cache
def compiled(net):
    return jax.jit(lambda *arguments: distributions.log_prob_and_entropy(net, *arguments))


def engine(net, parameters, output, actions, dtype: type = np.float64):
    with jax.enable_x64(dtype is np.float64):
        parameters = {name: x.astype(dtype) for name, x in parameters.items()}
        actions = actions if net.discrete else actions.astype(dtype)
        both = compiled(net)(parameters, output.astype(dtype), actions)
        assert all(x.dtype == dtype and x.shape == output.shape[:-1] for x in both)
        return [np.asarray(x) for x in both]


def logits_and_actions(seed):
    rng = np.random.default_rng(seed)
    return rng.uniform(-30, 30, (2, ROWS, CHOICES)), rng.integers(0, CHOICES, (2, ROWS)).astype(np.int32)


def gaussian(seed):
    rng = np.random.default_rng(seed)
    return *rng.uniform(-5, 5, (2, 2, ROWS, COMPONENTS)), rng.uniform(-2, 2, COMPONENTS)


@given(seeds)
def test_categorical_log_prob_and_entropy_are_the_references(seed):
    logits, actions = logits_and_actions(seed)
    log_prob, entropy = engine(DISCRETE, {}, logits, actions)
    np.testing.assert_allclose(log_prob, reference.categorical_log_prob(logits, actions), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(entropy, reference.categorical_entropy(logits), rtol=1e-11, atol=1e-12)
    single, entropy = engine(DISCRETE, {}, logits, actions, np.float32)
    np.testing.assert_allclose(single, log_prob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, reference.categorical_entropy(logits), rtol=1e-4, atol=1e-4)


@given(seeds)
def test_gaussian_log_prob_and_entropy_are_the_references(seed):
    mean, actions, log_std = gaussian(seed)
    log_prob, entropy = engine(GAUSSIAN, {"log_std": log_std}, mean, actions)
    expected = reference.gaussian_log_prob(mean, log_std, actions)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-11)
    np.testing.assert_allclose(entropy, np.full(entropy.shape, reference.gaussian_entropy(log_std)))
    log_prob, _ = engine(GAUSSIAN, {"log_std": log_std}, mean, actions, np.float32)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-4)


@given(seeds)
def test_gaussian_gradient_is_the_references_by_hand(seed):
    mean, actions, log_std = gaussian(seed)
    z = (actions - mean) / np.exp(log_std)

    def total(parameters, mean):
        return distributions.log_prob_and_entropy(GAUSSIAN, parameters, mean, actions)[0].sum()

    with jax.enable_x64(True):
        by_log_std, by_mean = jax.grad(total, (0, 1))({"log_std": log_std}, mean)
    np.testing.assert_allclose(by_mean, z / np.exp(log_std), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(by_log_std["log_std"], (z * z - 1).sum((0, 1)), rtol=1e-10, atol=1e-9)


def test_an_action_of_another_index_has_another_probability():
    """The negative of the comparison above."""
    logits, actions = logits_and_actions(0)
    moved = reference.categorical_log_prob(logits, (actions + 1) % CHOICES)
    assert not np.allclose(engine(DISCRETE, {}, logits, actions)[0], moved, atol=1e-3)


def gumbel(*shape):
    return np.random.default_rng(5).gumbel(size=shape).astype(np.float32)


def sampled(net, parameters, output, noise) -> Any:
    """One output for every row of noise."""
    return distributions.sample(net, parameters, jnp.broadcast_to(output, noise.shape), jnp.asarray(noise))


def test_adding_gumbel_noise_and_taking_the_largest_samples_the_softmax():
    net = CASES["several categoricals"].net(PolicyNet)
    logits, start = np.random.default_rng(1).normal(size=8).astype(np.float32), 0
    actions = sampled(net, {}, logits, gumbel(DRAWS, 8))
    assert (actions.shape, actions.dtype) == ((DRAWS, 3), np.int32)
    for n, size in enumerate(net.action.choices):
        part = logits[start : start + size]
        start += size
        found = np.bincount(actions[:, n], minlength=size) / DRAWS
        five_sigma = 5 * 0.5 / DRAWS**0.5
        np.testing.assert_allclose(found, np.exp(part) / np.exp(part).sum(), rtol=0, atol=five_sigma)
        assert int(distributions.mode(net, jnp.asarray(logits))[n]) == int(part.argmax())
        if size > 1:
            sharper = np.exp(1.5 * part) / np.exp(1.5 * part).sum()
            assert np.abs(found - sharper).max() > five_sigma


def test_normal_noise_samples_the_gaussian():
    noise = np.random.default_rng(2).normal(size=(DRAWS, 3)).astype(np.float32)
    mean, log_std = np.array([3, -1, 0], np.float32), np.array([0, -1, 1], np.float32)
    actions = sampled(GAUSSIAN, {"log_std": log_std}, mean, noise)
    np.testing.assert_allclose(actions, mean + np.exp(log_std) * noise, rtol=1e-6, atol=1e-6)
    assert actions.dtype == np.float32


def test_squashed_actions_fill_their_bounds_and_never_leave_them():
    net = CASES["squashed"].net(PolicyNet)
    numbers = np.array([[-50.0, -50.0], [0.0, 0.0], [50.0, 50.0], [0.5, -0.5]], np.float32)
    squashed = distributions.squash(net, jnp.asarray(numbers))
    assert squashed.dtype == np.float32
    assert squashed[:3].tolist() == [[-2.0, 0.0], [-0.5, 5.0], [1.0, 10.0]]
    assert squashed[3].tolist() == pytest.approx([-0.5 + 1.5 * np.tanh(0.5), 5 - 5 * np.tanh(0.5)], rel=1e-6)
    unsquashed = jnp.asarray(numbers)
    assert distributions.squash(CASES["std by state"].net(PolicyNet), unsquashed) is unsquashed


def test_what_is_masked_is_never_sampled():
    net = CASES["several categoricals, masked"].net(PolicyNet)
    allowed = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)
    logits = np.random.default_rng(1).normal(size=8).astype(np.float32)

    def forbidden(logits):
        actions = np.asarray(sampled(net, {}, logits, gumbel(DRAWS, 8)))
        return int((~allowed[actions + np.array([0, 3, 4])]).sum())

    assert forbidden(np.where(allowed, logits, np.float32(-1e8))) == 0
    assert forbidden(logits) > 100


@pytest.mark.parametrize("mask", [(1, 0, 1, 0), (1, 1, 1, 0), (0, 1, 1, 1)])
def test_random_actions_are_uniform_over_what_is_allowed(mask):
    """As those of the host are, for which the same is asked of these masks."""
    layout = observation_layout(Box(-1.0, 1.0, (2,), np.float32), mask_size=4)
    net = PolicyNet(layout, ActionLayout("discrete", (4,), (0,)))
    rows = np.tile(layout.encode(np.zeros(2), np.array(mask)), (DRAWS, 1))
    actions = np.asarray(distributions.random_actions(net, jnp.asarray(rows), jax.random.key(0)))
    expected = np.array(mask) / sum(mask)
    error = 4 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (abs(np.bincount(actions, minlength=4) / DRAWS - expected) <= error).all()


def test_random_actions_are_normal_where_float32_does_not_hold_the_span_between_bounds():
    largest = float(np.finfo(np.float32).max)
    wide = PolicyNet(VECTOR, ActionLayout("continuous", shape=(2,), low=(-largest, -1.0), high=(largest, 1.0)))
    actions = np.asarray(distributions.random_actions(wide, jnp.zeros((DRAWS, 3)), jax.random.key(0)))
    assert abs(actions[:, 0].std() - 1.0) < 0.05
    assert abs(actions[:, 1].std() - 2 / np.sqrt(12)) < 0.05
