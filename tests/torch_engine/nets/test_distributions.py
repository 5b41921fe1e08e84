"""Action distributions beyond one categorical and one Gaussian, against ``torch.distributions``; masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from small_runs import actions_of, policy_net, random_actions_of, random_parameters, seeded
from torch import distributions as reference

from lockstep.core.spaces import ActionLayout, observation_layout
from lockstep.torch_engine.nets import distributions, memory, nets
from lockstep.torch_engine.nets.nets import PolicyNet

CHOICES = (3, 1, 4)
MULTI = ActionLayout("multi_discrete", CHOICES, (0, 0, 0), (3,))
VECTOR = Box(-1.0, 1.0, (3,), np.float32)
DRAWS = 20_000


def gumbel(*shape: int) -> torch.Tensor:
    uniform = torch.rand(shape, generator=seeded(5), dtype=torch.float64).clamp(1e-12)
    return -torch.log(-torch.log(uniform))


def logits_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(1), dtype=torch.float64)


# --- Several categoricals ---------------------------------------------------------------------------------------------


def multi_net() -> PolicyNet:
    return replace(policy_net(4, 2, True, ()), action=MULTI)


def test_several_categoricals_are_independent_ones():
    net, logits = multi_net(), logits_of(2, 5, 8)
    actions = random_actions_of(net, (2, 5))
    log_prob, entropy = distributions.log_prob_and_entropy(net, {}, logits, actions)
    parts = [reference.Categorical(logits=part) for part in logits.split(CHOICES, -1)]
    expected = torch.stack([p.log_prob(actions[..., n]) for n, p in enumerate(parts)]).sum(0)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, torch.stack([p.entropy() for p in parts]).sum(0))
    other, _ = distributions.log_prob_and_entropy(net, {}, logits, actions.flip(0))
    assert not torch.allclose(other, expected, atol=1e-3)


def test_each_index_is_sampled_by_its_own_logits():
    net, logits = multi_net(), logits_of(1, 1, 8)
    actions = distributions.sample(net, {}, logits.expand(1, DRAWS, 8), gumbel(1, DRAWS, 8))[0]
    assert (actions.shape, actions.dtype) == ((DRAWS, 3), torch.int64)
    for n, part in enumerate(logits[0, 0].split(CHOICES)):
        found = torch.bincount(actions[:, n], minlength=CHOICES[n]).double() / DRAWS
        torch.testing.assert_close(found, part.softmax(-1), rtol=0, atol=5 * 0.5 / DRAWS**0.5)
        assert int(distributions.mode(net, logits)[0, 0, n]) == int(part.argmax())
    sharper = (1.5 * logits[0, 0, -4:]).softmax(-1)
    assert (torch.bincount(actions[:, 2]).double() / DRAWS - sharper).abs().max() > 5 * 0.5 / DRAWS**0.5


def test_an_accelerator_has_the_log_probabilities_and_gradients_of_the_host(monkeypatch):
    net, found = multi_net(), []
    actions = random_actions_of(net, (2, 5))
    for host in ({"cpu"}, set()):
        monkeypatch.setattr(memory, "HOST", host)
        logits = logits_of(2, 5, 8).requires_grad_()
        log_prob, entropy = distributions.log_prob_and_entropy(net, {}, logits, actions)
        (gradient,) = torch.autograd.grad((log_prob + 0.1 * entropy).sum(), logits)
        found.append((log_prob, entropy, gradient))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


# --- Squashed Gaussians -----------------------------------------------------------------------------------------------


def squashed_net(std_by_state: bool = False) -> PolicyNet:
    action = ActionLayout("continuous", shape=(2,), low=(-2.0, 0.0), high=(1.0, 10.0), dtype="float32")
    return replace(policy_net(4, 2, False, ()), action=action, squashed=True, state_dependent_std=std_by_state)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_a_squashed_gaussians_log_prob_is_that_of_the_transformed_distribution(scale):
    net, mean = squashed_net(), logits_of(2, 5, 2)
    log_std = torch.tensor([0.3, -1.0], dtype=torch.float64)
    before = mean + scale * torch.randn(2, 5, 2, generator=seeded(2), dtype=torch.float64)
    log_prob, entropy = distributions.log_prob_and_entropy(net, nets.expand({"log_std": log_std}, 2), mean, before)
    normal = reference.Normal(mean, log_std.exp().expand_as(mean))
    transform = reference.TanhTransform(cache_size=1)
    squashed = transform(before)
    assert squashed is not None
    expected = reference.TransformedDistribution(normal, [transform]).log_prob(squashed).sum(-1)
    torch.testing.assert_close(log_prob, expected, rtol=1e-8, atol=1e-8)
    assert entropy.shape == log_prob.shape  # its value and gradient: test_noise.py
    assert not torch.allclose(log_prob, normal.log_prob(before).sum(-1), atol=1e-3)


def test_far_out_a_squashed_log_prob_stays_finite():
    net, far = squashed_net(), torch.full((1, 1, 2), 40.0)
    log_prob, _ = distributions.log_prob_and_entropy(net, nets.expand({"log_std": torch.zeros(2)}, 1), far, far)
    assert log_prob.item() == pytest.approx(2 * (80 - 2 * np.log(2) - 0.5 * np.log(2 * np.pi)), rel=1e-5)


def test_squashed_actions_fill_their_bounds_and_never_leave_them():
    net = squashed_net()
    numbers = np.array([[-50.0, -50.0], [0.0, 0.0], [50.0, 50.0], [0.5, -0.5]], np.float32)
    squashed = net.squash(numbers)
    assert squashed.dtype == np.float32
    assert squashed[:3].tolist() == [[-2.0, 0.0], [-0.5, 5.0], [1.0, 10.0]]
    assert squashed[3] == pytest.approx([-0.5 + 1.5 * np.tanh(0.5), 5 - 5 * np.tanh(0.5)], rel=1e-6)
    assert replace(net, squashed=False).squash(numbers) is numbers


# --- Standard deviations by state -------------------------------------------------------------------------------------


def test_a_standard_deviation_by_state_is_the_other_half_of_the_output_within_limits():
    net, output = squashed_net(std_by_state=True), logits_of(2, 5, 4)
    net = replace(net, squashed=False)
    output[0, 0, 2], output[0, 1, 3] = -30.0, 30.0
    actions = logits_of(2, 5, 2) + 0.5
    log_prob, entropy = distributions.log_prob_and_entropy(net, {}, output, actions)
    normal = reference.Normal(output[..., :2], output[..., 2:].clamp(-5, 2).exp())
    torch.testing.assert_close(log_prob, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    noise = torch.ones(2, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(distributions.sample(net, {}, output, noise), normal.mean + normal.stddev)
    assert torch.equal(distributions.mode(net, output), output[..., :2])
    assert "log_std" not in net.shapes()
    assert net.shapes()["actor.0.weight"] == (4, 4)
    assert "log_std" in replace(net, state_dependent_std=False).shapes()
    exchanged = reference.Normal(output[..., 2:], output[..., :2].clamp(-5, 2).exp())
    assert not torch.allclose(log_prob, exchanged.log_prob(actions).sum(-1), atol=1e-3)


# --- Masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete"])
def test_what_is_masked_is_never_sampled_and_the_rest_is_a_distribution(kind):
    action = actions_of(True, 8) if kind == "discrete" else MULTI
    net = replace(policy_net(3, 8, True, (4,)), observation=observation_layout(VECTOR, mask_size=8), action=action)
    allowed = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0]).bool()
    rows = torch.cat([torch.randn(1, DRAWS, 3, generator=seeded(0)), allowed.float().expand(1, DRAWS, 8)], -1)
    weights = nets.expand(random_parameters(net), 1)
    output = nets.actor(net, weights, rows)
    free = nets.actor(net, weights, torch.cat([rows[..., :3], torch.ones(1, DRAWS, 8)], -1))
    assert torch.equal(output[..., allowed], free[..., allowed])

    def forbidden(logits: torch.Tensor) -> int:
        """How many sampled indices the mask forbids."""
        actions = distributions.sample(net, weights, logits, gumbel(*logits.shape).float())
        choices, start, count = action.choices, 0, 0
        for n, size in enumerate(choices):
            index = actions if kind == "discrete" else actions[..., n]
            count += int((~allowed[start + index]).sum())
            start += size
        return count

    assert forbidden(output) == 0
    assert forbidden(free) > 100
    actions = distributions.sample(net, weights, output, gumbel(*output.shape).float())
    log_prob, entropy = distributions.log_prob_and_entropy(net, weights, output, actions)
    parts = zip(free.split(action.choices, -1), allowed.split(action.choices), strict=True)
    left = [reference.Categorical(logits=part.masked_fill(~mask, -torch.inf)) for part, mask in parts]
    columns = [actions] if kind == "discrete" else list(actions.unbind(-1))
    expected = torch.stack([p.log_prob(column) for p, column in zip(left, columns, strict=True)]).sum(0)
    torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)
    entropies = []
    for p in left:
        entropies.append(-(p.probs * torch.log(p.probs.clamp(min=1e-30))).sum(-1))
    torch.testing.assert_close(entropy, torch.stack(entropies).sum(0), rtol=1e-5, atol=1e-5)


def test_masked_logits_have_no_gradient():
    net = replace(policy_net(3, 3, True, ()), observation=observation_layout(VECTOR, mask_size=3))
    rows = torch.tensor([[[0.5, -1.0, 2.0, 1.0, 0.0, 1.0]]])
    weights = {name: w.requires_grad_() for name, w in nets.expand(random_parameters(net), 1).items()}
    output = nets.actor(net, weights, rows)
    log_prob, entropy = distributions.log_prob_and_entropy(net, weights, output, torch.tensor([[0]]))
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), [weights["actor.0.weight"]])
    assert gradient[0, 1].tolist() == [0.0] * 3
    assert gradient[0, [0, 2]].abs().min() > 1e-6
