"""Squashed Gaussians, standard deviations by state and several indices, against torch.distributions and quadrature."""

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.torch_engine.nets import distributions
from lockstep.torch_engine.nets.nets import PolicyNet

OBSERVATION = ObservationLayout((Leaf("", "vector", (3,)),))
BOUNDED = ActionLayout("continuous", shape=(2,), low=(-1.0, 2.0), high=(3.0, 8.0), dtype="float32")
INDICES = ActionLayout("multi_discrete", choices=(3, 2), first=(0, 5), shape=(2,))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_squashed_log_prob_is_that_of_a_normal_through_a_tanh():
    net = PolicyNet(OBSERVATION, BOUNDED, squashed=True)
    mean, log_std, actions = drawn(1, 50, 2), drawn(1, 2, seed=1), 2.0 * drawn(1, 50, 2, seed=2)
    log_prob, _ = distributions.log_prob_and_entropy(net, {"log_std": log_std}, mean, actions)
    squashed = TransformedDistribution(Normal(mean, log_std.exp().unsqueeze(1)), TanhTransform())
    torch.testing.assert_close(log_prob, squashed.log_prob(torch.tanh(actions)).sum(-1), rtol=1e-8, atol=1e-8)
    plain, _ = distributions.log_prob_and_entropy(PolicyNet(OBSERVATION, BOUNDED), {"log_std": log_std}, mean, actions)
    assert (plain - log_prob).abs().min() > 1e-3


@pytest.mark.parametrize("size", [0.0, 5.0, 50.0, 500.0])
def test_a_squashed_log_prob_is_finite_far_out(size):
    net = PolicyNet(OBSERVATION, BOUNDED, squashed=True)
    actions = torch.full((1, 1, 2), size)
    log_prob, _ = distributions.log_prob_and_entropy(net, {"log_std": torch.zeros(1, 2)}, actions, actions)
    expected = 2 * (-0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - size - np.log1p(np.exp(-2 * size))))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)


def exact_entropy(mean, log_std):
    """Of one squashed component, by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(120)
    x = mean + np.exp(log_std) * points
    slope = 2.0 * (np.log(2.0) - np.logaddexp(x, -x))
    return 0.5 + 0.5 * np.log(2 * np.pi) + log_std + (weights * slope).sum() / weights.sum()


def test_a_squashed_entropy_and_its_gradient_are_right_on_average():
    net = PolicyNet(OBSERVATION, BOUNDED, squashed=True)
    at, step, count = (0.6, 0.2), 1e-4, 200_000
    mean = torch.full((1, count, 2), at[0], dtype=torch.float64, requires_grad=True)
    log_std = torch.full((1, 2), at[1], dtype=torch.float64, requires_grad=True)
    actions = (mean + log_std.exp() * drawn(1, count, 2)).detach()
    log_prob, entropy = distributions.log_prob_and_entropy(net, {"log_std": log_std}, mean, actions)
    assert entropy.mean().item() == pytest.approx(2 * exact_entropy(*at), abs=0.02)
    by_mean = (exact_entropy(at[0] + step, at[1]) - exact_entropy(at[0] - step, at[1])) / (2 * step)
    by_std = (exact_entropy(at[0], at[1] + step) - exact_entropy(at[0], at[1] - step)) / (2 * step)

    def gradient(x):
        d_mean, d_std = torch.autograd.grad(x.mean(), (mean, log_std), retain_graph=True)
        return d_mean[0].sum(0)[0].item(), d_std[0, 0].item()

    assert gradient(entropy) == pytest.approx((by_mean, by_std), abs=0.02)
    assert abs(by_mean) > 0.3
    assert gradient(-log_prob) == pytest.approx((0.0, 0.0), abs=0.02)  # so this can't stand for it


def test_squashed_actions_reach_both_bounds_and_the_middle():
    net = PolicyNet(OBSERVATION, BOUNDED, squashed=True)
    actions = np.array([[-30, -30], [0, 0], [30, 30]], np.float32)
    np.testing.assert_allclose(net.squash(actions), [[-1, 2], [1, 5], [3, 8]], rtol=1e-6)
    assert PolicyNet(OBSERVATION, BOUNDED).squash(actions) is actions


def test_a_standard_deviation_by_state_is_the_second_half_of_the_output():
    net = PolicyNet(OBSERVATION, BOUNDED, state_dependent_std=True)
    assert net.outputs == 4
    assert "log_std" not in net.shapes()
    output, actions = drawn(1, 20, 4).clamp(-2, 2), drawn(1, 20, 2, seed=1)
    log_prob, entropy = distributions.log_prob_and_entropy(net, {}, output, actions)
    normal = Normal(output[..., :2], output[..., 2:].exp())
    torch.testing.assert_close(log_prob, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    noise = drawn(1, 20, 2, seed=2)
    torch.testing.assert_close(
        distributions.sample(net, {}, output, noise), output[..., :2] + output[..., 2:].exp() * noise
    )
    torch.testing.assert_close(distributions.mode(net, output), output[..., :2])
    output[..., 2:] = 9.0
    wide = distributions.mean_and_log_std(net, {}, output)[1]
    assert wide.unique().tolist() == [distributions.LOG_STD_LIMITS[1]]


def test_several_indices_are_independent_categoricals():
    net = PolicyNet(OBSERVATION, INDICES)
    output = drawn(1, 20_000, 5)[:, :1].expand(1, 20_000, 5)
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=output.shape))
    actions = distributions.sample(net, {}, output, noise)
    parts = [Categorical(logits=output[..., :3]), Categorical(logits=output[..., 3:])]
    log_prob, entropy = distributions.log_prob_and_entropy(net, {}, output, actions)
    torch.testing.assert_close(log_prob, parts[0].log_prob(actions[..., 0]) + parts[1].log_prob(actions[..., 1]))
    torch.testing.assert_close(entropy, parts[0].entropy() + parts[1].entropy())
    for number, part in enumerate(parts):
        shares = torch.bincount(actions[0, :, number], minlength=part.probs.shape[-1]) / 20_000
        torch.testing.assert_close(shares.double(), part.probs[0, 0], atol=0.015, rtol=0)
    assert actions[0, 0].shape == (2,)
    assert INDICES.native(actions[0, 0])[1] in (5, 6)
