"""The gradient that is derived by hand: autograd's, for every option of the loss, and the reference's loss terms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lockstep.torch_engine.derived import derivable, ppo_gradients
from small_runs import naive_gradient, random_actions_of, random_parameters, seeded

from lockstep import reference
from lockstep.torch_engine import nets
from lockstep.torch_engine.activations import ACTIVATIONS, derivative_from_output, fast_activation
from lockstep.torch_engine.losses import TERMS, LossSettings
from lockstep.torch_engine.nets import PolicyNet

SETTINGS = LossSettings(clip_range=0.2, value_clip_range=None, entropy_coef=0.05, value_coef=0.5, count=24)
SHARDS = 2


@st.composite
def policy_nets(draw):
    return PolicyNet(
        observation_size=draw(st.sampled_from([1, 4, 11])),
        num_actions=draw(st.integers(1, 3)),
        discrete=draw(st.booleans()),
        hidden_sizes=draw(st.sampled_from([(), (1,), (6,), (9, 4)])),
        activation=draw(st.sampled_from(sorted(derivative_from_output))),
    )


@st.composite
def loss_settings(draw):
    return LossSettings(
        clip_range=draw(st.sampled_from([0.1, 0.3])),
        value_clip_range=draw(st.sampled_from([None, 0.2, 2.0])),
        entropy_coef=draw(st.sampled_from([0.0, 0.05])),
        value_coef=draw(st.sampled_from([0.0, 0.5, 1.0])),
        count=draw(st.sampled_from([SHARDS * 12, 100])),
    )


def minibatch_for(net: PolicyNet, parameters: dict[str, torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Twelve samples a shard of a policy and a critic that moved by about as much as is clipped."""
    shape, g = (SHARDS, 12), seeded(seed)
    x = torch.randn((*shape, net.observation_size), generator=g, dtype=torch.float64)
    actions = random_actions_of(net, shape, seed)
    actions = actions if net.discrete else actions.double()
    weights = nets.expand(parameters, SHARDS)
    log_prob, _ = nets.log_prob_and_entropy(net, weights, nets.actor(net, weights, x), actions)
    drawn = torch.randn((4, *shape), generator=g, dtype=torch.float64)
    values = nets.critic(net, weights, x) + 0.3 * drawn[1]
    return [x, actions, log_prob + 0.2 * drawn[0], values, drawn[2], drawn[3]]


def derived(
    net: PolicyNet, parameters: dict[str, torch.Tensor], settings: LossSettings, minibatch: list[torch.Tensor]
) -> torch.Tensor:
    return ppo_gradients(net, nets.expand(parameters, len(minibatch[0])), settings, *minibatch)


def in_float64(net: PolicyNet, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.double() for name, p in random_parameters(net, seed).items()}


@given(policy_nets(), loss_settings(), st.integers(0, 10_000))
def test_the_gradient_is_autograds(net, settings, seed):
    parameters = in_float64(net, seed)
    minibatch = minibatch_for(net, parameters, seed)
    ours = derived(net, parameters, settings, minibatch)
    assert ours.shape == (SHARDS, sum(p.numel() for p in parameters.values()) + len(TERMS))
    for shard in range(SHARDS):
        expected = naive_gradient(net, parameters, settings, [column[shard : shard + 1] for column in minibatch])
        torch.testing.assert_close(ours[shard, : -len(TERMS)], expected, rtol=1e-9, atol=1e-11)


@given(policy_nets(), loss_settings(), st.integers(0, 10_000))
def test_the_terms_are_the_references(net, settings, seed):
    parameters = in_float64(net, seed)
    x, actions, *rest = minibatch_for(net, parameters, seed)
    ours = derived(net, parameters, settings, [x, actions, *rest])[:, -len(TERMS) :]
    weights = nets.expand(parameters, SHARDS)
    log_prob, entropy = nets.log_prob_and_entropy(net, weights, nets.actor(net, weights, x), actions)
    old_log_prob, old_values, advantages, returns = (column.numpy() for column in rest)
    expected = reference.ppo_loss(
        log_prob.numpy(),
        old_log_prob,
        advantages,
        nets.critic(net, weights, x).numpy(),
        old_values,
        returns,
        entropy.numpy(),
        clip_range=settings.clip_range,
        value_clip_range=settings.value_clip_range,
        entropy_coef=settings.entropy_coef,
        value_coef=settings.value_coef,
        count=settings.count,
    )
    np.testing.assert_allclose(ours.sum(0).numpy(), [expected[name] for name in TERMS], rtol=1e-10, atol=1e-12)


@given(policy_nets(), loss_settings(), st.integers(0, 10_000))
def test_float32_loses_no_more_than_rounding(net, settings, seed):
    """A sample within rounding of where clipping sets in may fall to either side: there are none here."""
    parameters = in_float64(net, seed)
    minibatch = minibatch_for(net, parameters, seed)
    single = [column.float() if column.is_floating_point() else column for column in minibatch]
    ours = derived(net, {name: p.float() for name, p in parameters.items()}, settings, single)
    expected = derived(net, parameters, settings, minibatch)
    scale = float(expected.abs().max()) + 1.0
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def one_value(value: float, old: float, returns: float, limit: float | None) -> float:
    """The gradient of the critic's last bias for one sample whose value is `value`."""
    net = PolicyNet(1, 1, True, (), "tanh")
    parameters = {name: torch.zeros(shape) for name, shape in net.shapes().items()}
    parameters["critic.0.bias"][:] = value
    zeros = torch.zeros(1, 1)
    x, actions = zeros.unsqueeze(-1), zeros.long()
    minibatch = [x, actions, zeros, torch.full((1, 1), old), zeros, torch.full((1, 1), returns)]
    settings = replace(SETTINGS, value_clip_range=limit, value_coef=1.0, count=1)
    return derived(net, parameters, settings, minibatch)[0, -len(TERMS) - 1].item()


def test_a_clipped_value_by_hand():
    # V moved from 0 to 0.9 with R = 1: the clipped error 0.9 (at 0.1) is the worse, and constant.
    assert one_value(0.9, 0.0, 1.0, 0.1) == 0.0
    assert one_value(0.9, 0.0, 1.0, None) == pytest.approx(-0.1)
    # Away from R the unclipped error is the worse, and falls with V.
    assert one_value(-0.9, 0.0, 1.0, 0.1) == pytest.approx(-1.9)


@given(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32), st.floats(-3, 3, width=32))
def test_a_value_within_the_limit_has_the_gradient_of_an_unclipped_one(value, old, returns):
    """`old + (value - old)` is not always `value` in floating point: a tie must not turn into a clipped sample."""
    assert one_value(value, old, returns, 4.0) == pytest.approx(one_value(value, old, returns, None), abs=1e-6)


def test_every_option_changes_the_gradient():
    """The negative of the comparison with autograd: it would notice an option that is ignored."""
    net = PolicyNet(4, 3, True, (6,), "tanh")
    parameters = in_float64(net, 0)
    minibatch = minibatch_for(net, parameters, 0)
    changes = (
        {"clip_range": 0.01},
        {"value_clip_range": 0.05},
        {"entropy_coef": 0.5},
        {"value_coef": 0.1},
        {"count": 240},
    )
    gradients = [derived(net, parameters, replace(SETTINGS, **change), minibatch) for change in ({}, *changes)]
    for gradient in gradients[1:]:
        assert (gradient - gradients[0])[:, : -len(TERMS)].abs().max() > 1e-4


def test_only_activations_with_a_derivative_of_their_output_are_derived():
    derived = {name for name in ACTIVATIONS if derivable(PolicyNet(4, 2, True, (8,), name))}
    assert derived == {"tanh", "relu", "elu"}


# --- Activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_fast_activation_is_the_activation(name):
    x = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([0.0, -0.0, 1e-30, torch.nan])])
    expected = ACTIVATIONS[name](x.double())
    torch.testing.assert_close(
        fast_activation(name)(x.clone()).double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("name", derivative_from_output)
def test_a_derivative_from_the_output_is_autograds(name):
    x = torch.linspace(-6, 6, 98, dtype=torch.float64).requires_grad_()
    h, d = ACTIVATIONS[name](x), torch.linspace(-1, 2, 98, dtype=torch.float64)
    (expected,) = torch.autograd.grad(h, x, d)
    torch.testing.assert_close(derivative_from_output[name](d, h.detach()), expected)
    others = [derive(d, h.detach()) for other, derive in derivative_from_output.items() if other != name]
    assert not any(torch.allclose(other, expected) for other in others)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_networks_give_the_same_with_and_without_a_graph(activation):
    net = PolicyNet(4, 2, True, (64, 64), activation)
    weights, x = nets.expand(random_parameters(net), 3), torch.randn(3, 5, 4, generator=seeded(0))
    kept = x.clone()
    with_graph = nets.actor(net, weights, x)
    with torch.no_grad():
        torch.testing.assert_close(nets.actor(net, weights, x), with_graph, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept)
