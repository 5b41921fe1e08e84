"""The PyTorch engine's action distributions against the float64 reference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep import reference
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.torch_engine.nets.distributions import log_prob_and_entropy
from lockstep.torch_engine.nets.nets import PolicyNet


def floats(low=-5.0, high=5.0):
    return st.floats(low, high, allow_subnormal=False)


def policy_net(num_actions, discrete):
    bounds = (-1.0,) * num_actions
    continuous = ActionLayout("continuous", shape=(num_actions,), low=bounds, high=bounds)
    action = ActionLayout("discrete", (num_actions,), (0,)) if discrete else continuous
    return PolicyNet(ObservationLayout((Leaf("", "vector", (3,)),)), action, (4,))


@st.composite
def categoricals(draw):
    """Logits `[k, rows, actions]` and actions `[k, rows]`."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    logits = draw(arrays(np.float64, shape, elements=floats(-30, 30)))
    return logits, draw(arrays(np.int64, shape[:2], elements=st.integers(0, shape[2] - 1)))


@st.composite
def gaussians(draw):
    """Means and actions `[k, rows, components]`, log standard deviations `[components]`."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    mean, actions = (draw(arrays(np.float64, shape, elements=floats())) for _ in range(2))
    return mean, actions, draw(arrays(np.float64, shape[2], elements=floats(-2, 2)))


def engine(output, actions, log_std=None, dtype=torch.float64):
    net = policy_net(output.shape[-1], log_std is None)
    parameters = {}
    if log_std is not None:
        parameters["log_std"] = torch.from_numpy(log_std).to(dtype).expand(len(output), -1)
        actions = actions.astype(np.float64)
    taken = torch.from_numpy(actions)
    taken = taken if log_std is None else taken.to(dtype)
    return log_prob_and_entropy(net, parameters, torch.from_numpy(output).to(dtype), taken)


@given(categoricals())
def test_categorical_log_prob_and_entropy_are_the_references(drawn):
    logits, actions = drawn
    log_prob, entropy = engine(logits, actions)
    assert log_prob.shape == entropy.shape == actions.shape
    np.testing.assert_allclose(log_prob.numpy(), reference.categorical_log_prob(logits, actions), rtol=1e-12)
    np.testing.assert_allclose(entropy.numpy(), reference.categorical_entropy(logits), rtol=1e-11, atol=1e-12)


@given(gaussians())
def test_gaussian_log_prob_and_entropy_are_the_references(drawn):
    mean, actions, log_std = drawn
    log_prob, entropy = engine(mean, actions, log_std)
    assert log_prob.shape == entropy.shape == mean.shape[:2]
    np.testing.assert_allclose(log_prob.numpy(), reference.gaussian_log_prob(mean, log_std, actions), rtol=1e-11)
    np.testing.assert_allclose(entropy.numpy(), np.full(mean.shape[:2], reference.gaussian_entropy(log_std)))


@given(categoricals())
def test_categorical_float32_loses_no_more_than_rounding(drawn):
    logits, actions = drawn
    log_prob, entropy = engine(logits, actions, dtype=torch.float32)
    expected = reference.categorical_log_prob(logits.astype(np.float32), actions)
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), reference.categorical_entropy(logits), rtol=1e-4, atol=1e-4)


@given(gaussians())
def test_gaussian_float32_loses_no_more_than_rounding(drawn):
    mean, actions, log_std = drawn
    log_prob, _ = engine(mean, actions, log_std, dtype=torch.float32)
    np.testing.assert_allclose(log_prob.numpy(), reference.gaussian_log_prob(mean, log_std, actions), rtol=1e-4)


@given(gaussians())
def test_gaussian_gradient_is_the_references_by_finite_differences(drawn):
    mean, actions, log_std = drawn
    scale = torch.from_numpy(log_std).requires_grad_()
    centre = torch.from_numpy(mean).requires_grad_()
    parameters = {"log_std": scale.expand(len(mean), -1)}
    log_prob, _ = log_prob_and_entropy(policy_net(len(log_std), False), parameters, centre, torch.from_numpy(actions))
    by_mean, by_log_std = torch.autograd.grad(log_prob.sum(), [centre, scale])
    z = (actions - mean) / np.exp(log_std)
    np.testing.assert_allclose(by_mean.numpy(), z / np.exp(log_std), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(by_log_std.numpy(), (z**2 - 1).sum((0, 1)), rtol=1e-10, atol=1e-8)


def test_by_hand_and_another_action_has_another_probability():
    # logits log 1, log 3: p = 1/4, 3/4.
    logits = np.log(np.array([[[1.0, 3.0], [1.0, 3.0]]]))
    log_prob, entropy = engine(logits, np.array([[0, 1]]))
    assert log_prob[0].tolist() == pytest.approx([np.log(0.25), np.log(0.75)])
    assert entropy[0].tolist() == pytest.approx(2 * [0.25 * np.log(4) + 0.75 * np.log(4 / 3)])


def test_shards_and_rows_are_not_mixed():
    """Each shard and row is scored with its own output: exchanging two outputs is noticed."""
    rng = np.random.default_rng(0)
    logits, actions = rng.normal(size=(2, 3, 4)), rng.integers(0, 4, (2, 3))
    log_prob, _ = engine(logits, actions)
    exchanged, _ = engine(logits[::-1].copy(), actions)
    alone = [[reference.categorical_log_prob(logits[s, r], actions[s, r]) for r in range(3)] for s in range(2)]
    np.testing.assert_allclose(log_prob.numpy(), alone, rtol=1e-12)
    assert not np.allclose(exchanged.numpy(), alone)
