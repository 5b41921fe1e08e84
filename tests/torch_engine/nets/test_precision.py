"""bfloat16: really on inside the networks, in rollouts, evaluations and gradients, and nowhere else."""

import sys

import pytest
import torch
from small_runs import (
    alone,
    described,
    joined,
    plan_of,
    random_batch,
    run_ranks,
    seeded,
    shards_gradients,
    small_config,
    small_state,
)
from torch import nn

from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.nets import nets
from lockstep.torch_engine.policy import PolicyFunction
from lockstep.torch_engine.setup.choose_mode import choose_mode
from lockstep.torch_engine.state import POLICY, TrainState, state_arrays

LOW, FULL = torch.bfloat16, torch.float32
BY_AUTOGRAD = {"activation": "silu"}
NETS = {
    "tanh": {},
    "silu": {**BY_AUTOGRAD, "shared": True},
    "LSTM": {**BY_AUTOGRAD, "recurrent": "lstm", "recurrent_size": 8, "sequence_length": 4},
    "GRU": {**BY_AUTOGRAD, "recurrent": "gru", "recurrent_size": 8, "sequence_length": 4},
}


@pytest.fixture
def products(monkeypatch):
    """Dtypes of what the networks' batched matrix products give, in order."""
    seen = []
    for name in ("baddbmm", "bmm"):
        right = getattr(torch, name)

        def watched(*arguments, right=right, **options):
            out = right(*arguments, **options)
            seen.append(out.dtype)
            return out

        monkeypatch.setattr(torch, name, watched)
    return seen


def few_bits(x):
    """Whether all numbers are some of bfloat16's."""
    return torch.equal(x, x.to(LOW).float())


@pytest.fixture
def telling():
    """The user's module that tells of its activations."""
    __import__("users_nets")
    kind = sys.modules["users_nets"].Telling
    kind.seen.clear()
    return kind


def config_of(precision, **network):
    return small_config(precision=precision, network=network, num_steps=8)


def acted(state: TrainState, plan: ShardPlan):
    """A step of a rollout of all environments."""
    torch.manual_seed(0)
    observations, noise = torch.randn(plan.local_num_envs, 4).numpy(), torch.zeros(plan.local_num_envs, 3).numpy()
    actor = state.policy.actor(plan, "loop")
    actor.begin(state.recurrent_state)
    with torch.inference_mode():
        return actor(observations, noise)


def minibatch(config, state):
    columns = random_batch(config, state.net).columns()
    if state.net.core:
        k, rows = columns["actions"].shape
        columns = {name: x.unflatten(1, (-1, 4)) for name, x in columns.items()}
        columns["recurrent_state"] = torch.randn(k, rows // 4, state.net.state_size, generator=seeded(3))
        columns["resets"] = (torch.randn(columns["actions"].shape, generator=seeded(4)) > 1).float()
    return columns


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", LOW), ("fp32", FULL)])
@pytest.mark.parametrize("net", ["silu", "LSTM", "GRU"])
def test_matrix_products_are_of_the_precision_asked_for_and_those_of_heads_float32(products, precision, dtype, net):
    config = config_of(precision, **NETS[net])
    state = small_state(config, described())

    def heads_alone(heads):
        """Whether all products but so many were of that precision, since it was asked last."""
        seen, products[:] = list(products), []
        return len(seen) > heads and seen.count(dtype) == (len(seen) if dtype == FULL else len(seen) - heads)

    acted(state, plan_of(config))
    assert heads_alone(config.shards)  # the actor's
    gradient = shards_gradients(state, config)(minibatch(config, state), 32)
    assert heads_alone(2)
    assert gradient.dtype == state.parameters.flat.dtype == FULL
    function = PolicyFunction(
        config, _environment(), {POLICY + k: v.numpy() for k, v in state.parameters.views.items()}
    )
    function(torch.randn(2, 4).numpy(), None, torch.zeros(2, function.state_size).numpy())
    assert heads_alone(1)


def _environment():
    from dataclasses import asdict

    return asdict(described())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", LOW), ("fp32", FULL)])
def test_activations_inside_a_users_module_are_of_the_precision_asked_for(telling, precision, dtype):
    config = config_of(precision, custom="users_nets:Telling")
    state = small_state(config, described())
    telling.seen.clear()
    acted(state, plan_of(config))
    assert telling.seen == {(str(dtype), False)}
    telling.seen.clear()
    columns = minibatch(config, state) | {"dropout_seed": torch.zeros(config.shards, 1, dtype=torch.long)}
    fast_gradient(state, config, alone(config))(columns, 32)
    assert telling.seen == {(str(dtype), True)}


@pytest.mark.parametrize("net", NETS)
def test_values_and_log_probabilities_are_float32_made_of_bfloat16(net):
    if NETS[net].get("recurrent"):
        config = config_of("bf16", **NETS[net])
        state = small_state(config, described())
        x, carry = torch.randn(1, 3, 2, 4), torch.randn(1, 2, state.net.state_size)
        results = nets.unroll(state.net, state.parameters.expanded(1), x, carry, torch.zeros(1, 3, 2))
    else:
        states = [small_state(config_of(p, **NETS[net]), described()) for p in ("bf16", "fp32")]
        x, actions = torch.randn(1, 5, 4, generator=seeded(0)), torch.randint(0, 3, (1, 5), generator=seeded(1))
        with torch.no_grad():
            results, full = (state.policy.evaluate(x, actions) for state in states)
        for low, high in zip(results, full, strict=True):
            torch.testing.assert_close(low, high, rtol=0.05, atol=0.05)
            assert not torch.equal(low, high)
    assert {x.dtype for x in results if x is not None} == {FULL}


@pytest.mark.parametrize("net", NETS)
def test_heads_in_bfloat16_are_those_of_float32_on_the_same_features(net, monkeypatch):
    """Far from 0 steps between numbers of bfloat16 are large: those of a value near 195 are 1."""
    config = config_of("bf16", **NETS[net])
    state, heads = small_state(config, described()), []
    for name, parameter in state.parameters.views.items():
        if name.startswith("critic.") and name.endswith(".bias") and parameter.shape == (1,):
            parameter.fill_(195.0)
    right = nets.linear

    def watched(x, weight, bias):
        if weight.shape[1] in (1, 3):
            heads.append(right(x.double(), weight.double(), bias.double()))
        return right(x, weight, bias)

    monkeypatch.setattr(nets, "linear", watched)
    x, weights = torch.randn(1, 3, 5, 4, generator=seeded(0)), state.parameters.expanded(1)
    with torch.no_grad():
        if state.net.core:
            carry, none = torch.zeros(1, 5, state.net.state_size), torch.zeros(1, 3, 5)
            results = nets.unroll(state.net, weights, x, carry, none)[:2]
        else:
            results = nets.actor_critic(state.net, weights, x.flatten(1, 2))
    for found, head in zip(results, heads, strict=True):
        assert found is not None
        assert not few_bits(found)
        torch.testing.assert_close(found, head.view(found.shape).float(), rtol=1e-6, atol=1e-6)


def test_a_users_module_may_have_a_head_of_its_own_in_float32():
    for custom, rounded in (("users_nets:Tiny", True), ("users_nets:WideHead", False)):
        state = small_state(config_of("bf16", custom=custom), described())
        with torch.no_grad():
            results = nets.actor_critic(state.net, state.parameters.expanded(1), torch.randn(1, 9, 4))
        assert [few_bits(x) for x in results] == [rounded] * 2


@pytest.mark.parametrize("net", ["silu", "LSTM", "tanh"])
def test_two_ranks_and_three_take_the_gradient_of_one_in_bfloat16(net):
    config = config_of("bf16", **NETS[net])

    def rank(plan, communicator):
        state = small_state(config, described(), plan)
        mode = choose_mode(state, config, communicator)
        owned = slice(plan.shards.start, plan.shards.stop)
        columns = {name: x[owned].clone() for name, x in minibatch(config, state).items()}
        return mode, joined(exact_gradient(state, config, communicator, mode)(columns, 32))

    mode, one = rank(plan_of(config), alone(config))
    more = [result for ranks in (2, 3) for result in run_ranks(config, ranks, rank)]
    full_state = small_state(config_of("fp32", **NETS[net]), described())
    full = exact_gradient(full_state, config_of("fp32", **NETS[net]), alone(config), "loop")
    assert [m for m, _ in more] == [mode] * 5
    assert all(torch.equal(gradient, one) for _, gradient in more)
    assert not torch.equal(joined(full(minibatch(config, full_state), 32)), one)


def test_a_state_in_bfloat16_is_saved_in_float32():
    assert {a.dtype.name for a in state_arrays(small_state(config_of("bf16"), described())).values()} == {"float32"}
    assert nn.Linear(2, 2).weight.dtype == FULL  # nothing was set for everybody
