"""Plain policies in NumPy: what PyTorch computes, the gradient autograd's, and the loss terms the reference's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import naive_gradient, policy_net, random_actions_of, random_parameters, seeded

from lockstep import reference
from lockstep.torch_engine.nets import activations, distributions, nets
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.plain import policy
from lockstep.torch_engine.plain.layers import ACTIVATIONS
from lockstep.torch_engine.plain.policy import PlainPolicy, derivable
from lockstep.training.losses import TERMS, LossSettings

SETTINGS = LossSettings(clip_range=0.2, value_clip_range=None, entropy_coef=0.05, value_coef=0.5, count=24)
SHARDS = 2


@st.composite
def policy_nets(draw):
    return policy_net(
        size=draw(st.sampled_from([1, 4, 11])),
        actions=draw(st.sampled_from([1, 2, 3, 9])),
        discrete=draw(st.booleans()),
        hidden_sizes=draw(st.sampled_from([(), (1,), (6,), (9, 4)])),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
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


def minibatch_for(net: PolicyNet, parameters: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Twelve samples a shard of a policy and a critic that moved by about as much as is clipped."""
    shape, g = (SHARDS, 12), seeded(seed)
    x = torch.randn((*shape, net.observation.width), generator=g, dtype=torch.float64)
    actions = random_actions_of(net, shape, seed)
    actions = actions if net.discrete else actions.double()
    weights = nets.expand(parameters, SHARDS)
    log_prob, _ = distributions.log_prob_and_entropy(net, weights, nets.actor(net, weights, x), actions)
    drawn = torch.randn((4, *shape), generator=g, dtype=torch.float64)
    values = nets.critic(net, weights, x) + 0.3 * drawn[1]
    return {
        "observations": x,
        "actions": actions,
        "log_probs": log_prob + 0.2 * drawn[0],
        "values": values,
        "advantages": drawn[2],
        "returns": drawn[3],
    }


def flat(parameters: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([p.flatten() for p in parameters.values()]).numpy()


def by_hand(
    net: PolicyNet, parameters: dict[str, torch.Tensor], settings: LossSettings, minibatch: dict[str, torch.Tensor]
) -> torch.Tensor:
    plain = PlainPolicy(net, flat(parameters))
    return torch.from_numpy(plain.gradients({name: x.numpy() for name, x in minibatch.items()}, settings).copy())


def in_float64(net: PolicyNet, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.double() for name, p in random_parameters(net, seed).items()}


@given(policy_nets(), loss_settings(), st.integers(0, 10_000))
def test_the_gradient_is_autograds(net, settings, seed):
    parameters = in_float64(net, seed)
    minibatch = minibatch_for(net, parameters, seed)
    ours = by_hand(net, parameters, settings, minibatch)
    assert ours.shape == (SHARDS, sum(p.numel() for p in parameters.values()) + len(TERMS))
    for shard in range(SHARDS):
        part = {name: column[shard : shard + 1] for name, column in minibatch.items()}
        expected = naive_gradient(net, parameters, settings, part)
        torch.testing.assert_close(ours[shard, : -len(TERMS)], expected, rtol=1e-9, atol=1e-11)


@given(policy_nets(), loss_settings(), st.integers(0, 10_000))
def test_the_terms_are_the_references(net, settings, seed):
    parameters = in_float64(net, seed)
    minibatch = minibatch_for(net, parameters, seed)
    ours = by_hand(net, parameters, settings, minibatch)[:, -len(TERMS) :]
    x, actions, *rest = minibatch.values()
    weights = nets.expand(parameters, SHARDS)
    log_prob, entropy = distributions.log_prob_and_entropy(net, weights, nets.actor(net, weights, x), actions)
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
    single = {name: x.float() if x.is_floating_point() else x for name, x in minibatch.items()}
    ours = by_hand(net, {name: p.float() for name, p in parameters.items()}, settings, single)
    expected = by_hand(net, parameters, settings, minibatch)
    scale = float(expected.abs().max()) + 1.0
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def one_value(value: float, old: float, returns: float, limit: float | None) -> float:
    """The gradient of the critic's last bias for one sample whose value is `value`."""
    net = policy_net(1, 1, True, ())
    parameters = {name: torch.zeros(shape) for name, shape in net.shapes().items()}
    parameters["critic.0.bias"][:] = value
    zeros = torch.zeros(1, 1)
    minibatch = {"observations": zeros.unsqueeze(-1), "actions": zeros.long()}
    minibatch |= {"log_probs": zeros, "advantages": zeros}
    minibatch |= {"values": torch.full((1, 1), old), "returns": torch.full((1, 1), returns)}
    settings = replace(SETTINGS, value_clip_range=limit, value_coef=1.0, count=1)
    return by_hand(net, parameters, settings, minibatch)[0, -len(TERMS) - 1].item()


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
    net = policy_net(4, 3, True, (6,))
    parameters = in_float64(net, 0)
    minibatch = minibatch_for(net, parameters, 0)
    changes = (
        {"clip_range": 0.01},
        {"value_clip_range": 0.05},
        {"entropy_coef": 0.5},
        {"value_coef": 0.1},
        {"count": 240},
    )
    gradients = [by_hand(net, parameters, replace(SETTINGS, **change), minibatch) for change in ({}, *changes)]
    for gradient in gradients[1:]:
        assert (gradient - gradients[0])[:, : -len(TERMS)].abs().max() > 1e-4


def test_what_is_plain():
    assert {name for name in activations.ACTIVATIONS if derivable(policy_net(4, 2, True, (8,), name))} == set(
        ACTIVATIONS
    )
    for option in ("shared", "squashed", "state_dependent_std", "core"):
        assert not derivable(replace(policy_net(4, 2, False, (8,)), **{option: "gru" if option == "core" else True}))
    assert not derivable(policy_net(4, 2, False, (8,), critic=False))


# --- Forward ----------------------------------------------------------------------------------------------------------


@given(policy_nets(), st.integers(0, 10_000))
def test_outputs_values_log_probs_and_actions_are_pytorchs(net, seed):
    parameters = in_float64(net, seed)
    plain = PlainPolicy(net, flat(parameters))
    weights, g = nets.expand(parameters, SHARDS), seeded(seed)
    x = torch.randn((SHARDS, 5, net.observation.width), generator=g, dtype=torch.float64)
    noise = torch.randn((SHARDS, 5, net.action.outputs), generator=g, dtype=torch.float64)
    kept = x.clone()
    output, values = nets.actor(net, weights, x), nets.critic(net, weights, x)
    actions = distributions.sample(net, weights, output, noise)
    log_prob, _ = distributions.log_prob_and_entropy(net, weights, output, actions)
    np.testing.assert_allclose(plain.output(x.numpy()), output.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(plain.values(x.numpy()), values.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(plain.act(x.numpy(), noise.numpy()), actions.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(plain.log_probs(x.numpy(), actions.numpy()), log_prob.numpy(), rtol=1e-11, atol=1e-12)
    assert torch.equal(x, kept)
    assert plain.act(x.numpy(), noise.numpy()).dtype == (np.int64 if net.discrete else np.float64)


def test_the_parameters_are_the_same_memory_and_float32_stays_float32():
    net = policy_net(4, 2, False, (6,))
    parameters = flat(random_parameters(net))
    plain = PlainPolicy(net, parameters)
    x = np.ones((1, 3, 4), np.float32)
    before = plain.output(x)
    parameters[:24] += 0.5  # the actor's first weight
    after = plain.output(x)
    assert not np.allclose(before, after, atol=1e-3)
    drawn = {"act": plain.act(x, np.ones((1, 3, 2), np.float32)), "values": plain.values(x)}
    assert {array.dtype.name for array in (after, *drawn.values())} == {"float32"}


@given(policy_nets(), st.integers(0, 10_000))
def test_a_shards_bits_do_not_depend_on_its_company(net, seed):
    parameters = random_parameters(net, seed)
    minibatch = minibatch_for(net, in_float64(net, seed), seed)
    single = {name: x.float() if x.is_floating_point() else x for name, x in minibatch.items()}
    together = by_hand(net, parameters, SETTINGS, single)
    for shard in range(SHARDS):
        alone = by_hand(net, parameters, SETTINGS, {name: x[shard : shard + 1].clone() for name, x in single.items()})
        assert torch.equal(alone[0], together[shard])
    assert not torch.equal(together[0], together[1])


@given(
    st.booleans(),
    st.sampled_from([1, 8, 32, 600]),
    st.sampled_from([(64, 64), (1,), (64, 1), (1, 64), (6,)]),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from([1, 2, 9]),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_networks_side_by_side_have_the_bits_of_each_alone(discrete, rows, hidden, activation, actions, masked, shards):
    net = policy_net(5, actions, discrete, hidden, activation)
    shape, g = (shards, rows), seeded(2)
    names = ("log_probs", "values", "advantages", "returns")
    columns = {"observations": torch.randn((*shape, 5), generator=g), "actions": random_actions_of(net, shape, 3)}
    columns |= dict(zip(names, torch.randn((4, *shape), generator=g), strict=True))
    if masked:
        columns["valid"] = (torch.rand(shape, generator=g) < 0.7).float()
    arrays = {name: column.numpy() for name, column in columns.items()}

    def gradients(few_numbers: int) -> tuple[np.ndarray, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "FEW_NUMBERS", few_numbers)
            plain, calls = PlainPolicy(net, flat(random_parameters(net, 4))), []
            product = np.matmul
            patch.setattr(np, "matmul", lambda *given, **named: calls.append(given) or product(*given, **named))
            return plain.gradients(arrays, SETTINGS).copy(), len(calls)

    (together, few), (apart, many) = gradients(1 << 30), gradients(0)
    assert few < many
    np.testing.assert_array_equal(together, apart)


# --- Activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_a_fast_activation_is_the_activation(name):
    x = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([0.0, -0.0, 1e-30, torch.nan])])
    expected = activations.ACTIVATIONS[name](x.double())
    fast = activations.fast_activation(name)(x.clone()).double()
    torch.testing.assert_close(fast, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives_are_autograds(name):
    x = torch.linspace(-6, 6, 98, dtype=torch.float64).requires_grad_()
    h, d = activations.ACTIVATIONS[name](x), torch.linspace(-1, 2, 98, dtype=torch.float64)
    (expected,) = torch.autograd.grad(h, x, d)
    activate, derive = ACTIVATIONS[name]
    ours = activate(x.detach().numpy().copy())  # whose memory a derivative may use up
    np.testing.assert_allclose(ours, h.detach().numpy(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(derive(d.numpy().copy(), ours.copy()), expected.numpy(), rtol=1e-9, atol=1e-12)
    others = [other(d.numpy().copy(), ours.copy()) for which, (_, other) in ACTIVATIONS.items() if which != name]
    assert not any(np.allclose(other, expected.numpy()) for other in others)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_networks_give_the_same_with_and_without_a_graph(activation):
    net = policy_net(4, 2, True, (64, 64), activation)
    weights, x = nets.expand(random_parameters(net), 3), torch.randn(3, 5, 4, generator=seeded(0))
    kept = x.clone()
    with_graph = nets.actor(net, weights, x)
    with torch.no_grad():
        torch.testing.assert_close(nets.actor(net, weights, x), with_graph, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept)
