"""Recurrent cores: those of ``torch.nn``, with resets, and each shard as if it were alone."""

import pytest
import torch
from small_runs import policy_net, random_parameters, seeded
from torch import Tensor, nn

from lockstep.networks.spec import core_shapes, core_state_size
from lockstep.torch_engine.nets import nets, recurrent
from lockstep.torch_engine.setup.self_check import shard_invariant

SHARDS, STEPS, ENVS, INPUTS, SIZE = 2, 7, 3, 5, 6
with_both = pytest.mark.parametrize("core", ["lstm", "gru"])


def drawn(core: str, shards: int = SHARDS, size: int = SIZE, envs: int = ENVS) -> dict[str, Tensor]:
    """Inputs, a carry, and resets in some places."""
    g = seeded(0)
    return {
        "x": torch.randn(shards, STEPS, envs, INPUTS, generator=g),
        "carry": 0.5 * torch.randn(shards, envs, core_state_size(core, size), generator=g),
        "resets": (torch.rand(shards, STEPS, envs, generator=g) < 0.3).float(),
    }


def weights_of(core: str, size: int = SIZE) -> dict[str, Tensor]:
    g = seeded(1)
    shapes = core_shapes(core, "actor", INPUTS, size)
    return {name: 0.5 * torch.randn(shape, generator=g) for name, shape in shapes.items()}


def reference_core(core: str, weights: dict[str, Tensor]) -> nn.LSTM | nn.GRU:
    module = (nn.LSTM if core == "lstm" else nn.GRU)(INPUTS, SIZE)
    names = {"weight_ih_l0": "input.weight", "weight_hh_l0": "hidden.weight", "bias_ih_l0": "input.bias"}
    with torch.no_grad():
        for theirs, ours in names.items():
            getattr(module, theirs).copy_(weights[f"actor.core.{ours}"])
        module.get_parameter("bias_hh_l0").copy_(
            weights["actor.core.hidden.bias"] if core == "gru" else torch.zeros(4 * SIZE)
        )
    return module


def expected(module: nn.Module, core: str, data: dict[str, Tensor], shard: int) -> Tensor:
    """Hidden states `[steps, envs, size]` of one shard by ``torch.nn``, an environment at a time, step by step."""
    columns = []
    for env in range(ENVS):
        state = data["carry"][shard, env].view(1, 1, -1).split(SIZE, -1)
        rows = []
        for t in range(STEPS):
            if data["resets"][shard, t, env]:
                state = tuple(torch.zeros_like(part) for part in state)
            given = tuple(part.contiguous() for part in state) if core == "lstm" else state[0].contiguous()
            out, after = module(data["x"][shard, t, env].view(1, 1, -1), given)
            state = after if core == "lstm" else (after,)
            rows.append(out.view(-1))
        columns.append(torch.stack(rows))
    return torch.stack(columns, 1)


@with_both
def test_a_core_is_that_of_torch_nn(core):
    data, weights = drawn(core), weights_of(core)
    hidden, carries = recurrent.unroll(core, nets.expand(weights, SHARDS), "actor", *data.values())
    assert hidden.shape == (SHARDS, STEPS, ENVS, SIZE)
    assert carries.shape == (SHARDS, STEPS, ENVS, core_state_size(core, SIZE))
    assert torch.equal(carries[..., :SIZE], hidden)
    module = reference_core(core, weights)
    for shard in range(SHARDS):
        torch.testing.assert_close(hidden[shard], expected(module, core, data, shard), rtol=1e-5, atol=1e-6)
    without = data | {"resets": torch.zeros_like(data["resets"])}
    assert not torch.allclose(hidden[0], expected(module, core, without, 0), atol=1e-2)


@with_both
def test_each_shard_has_the_gradient_of_torch_nn(core):
    data, weights = drawn(core), weights_of(core)
    ours = {name: w.requires_grad_() for name, w in nets.expand(weights, SHARDS).items()}
    hidden, _ = recurrent.unroll(core, ours, "actor", *data.values())
    gradients = dict(zip(ours, torch.autograd.grad(hidden.square().sum(), list(ours.values())), strict=True))
    for shard in range(SHARDS):
        module = reference_core(core, weights)
        expected(module, core, data, shard).square().sum().backward()
        for theirs, name in (
            ("weight_ih_l0", "input.weight"),
            ("weight_hh_l0", "hidden.weight"),
            ("bias_ih_l0", "input.bias"),
        ):
            gradient = getattr(module, theirs).grad
            torch.testing.assert_close(gradients[f"actor.core.{name}"][shard], gradient, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients["actor.core.input.weight"][0], gradients["actor.core.input.weight"][1])


@with_both
def test_a_reset_forgets_all_that_came_before_and_nothing_after(core):
    data, weights = drawn(core), nets.expand(weights_of(core), SHARDS)
    resets = torch.zeros_like(data["resets"])
    resets[:, 4, 1] = 1.0
    whole, _ = recurrent.unroll(core, weights, "actor", data["x"], data["carry"], resets)
    zeros = torch.zeros_like(data["carry"])
    fresh, _ = recurrent.unroll(core, weights, "actor", data["x"][:, 4:], zeros, torch.zeros_like(resets[:, 4:]))
    torch.testing.assert_close(whole[:, 4:, 1], fresh[:, :, 1])
    assert not torch.allclose(whole[:, 4:, 0], fresh[:, :, 0], atol=1e-3)


@with_both
@pytest.mark.parametrize(("size", "envs"), [(16, 1), (16, 4), (64, 8)])
def test_batching_shards_keeps_their_bits(core, size, envs):
    """Where it does not hold the engine loops over shards, slower and just as right."""
    data, weights = drawn(core, 8, size, envs), weights_of(core, size)

    def function(x: Tensor, carry: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        return recurrent.unroll(core, nets.expand(weights, len(x)), "actor", x, carry, resets)

    assert shard_invariant(function, 8, *data.values())
    assert not shard_invariant(lambda *a: function(*a)[0] + len(a[0]) * 1e-7, 8, *data.values())


# --- Networks with a core ---------------------------------------------------------------------------------------------


@with_both
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_steps_one_by_one_are_the_sequence(core, shared):
    net = policy_net(INPUTS, 3, True, (8,), core=core, core_size=SIZE, shared=shared)
    weights, data = nets.expand(random_parameters(net), SHARDS), drawn(core)
    carry = torch.randn(SHARDS, ENVS, net.state_size, generator=seeded(2))
    output, values, carries = nets.unroll(net, weights, data["x"], carry, data["resets"])
    assert values is not None
    assert net.state_size == (1 if shared else 2) * core_state_size(core, SIZE)
    for t in range(STEPS):
        alone = nets.unroll(net, weights, data["x"][:, t : t + 1], carry, data["resets"][:, t : t + 1])
        torch.testing.assert_close(alone[0][:, 0], output[:, t], rtol=1e-5, atol=1e-6)
        assert alone[1] is not None
        torch.testing.assert_close(alone[1][:, 0], values[:, t], rtol=1e-5, atol=1e-6)
        carry = alone[2][:, 0]
        torch.testing.assert_close(carry, carries[:, t], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(output[:, 0], output[:, 1], atol=1e-3)


@with_both
def test_the_actor_alone_gives_the_same_and_leaves_the_critics_carry(core):
    net = policy_net(INPUTS, 3, True, (8,), core=core, core_size=SIZE)
    weights, data = nets.expand(random_parameters(net), SHARDS), drawn(core)
    carry, none = torch.randn(SHARDS, ENVS, net.state_size, generator=seeded(2)), torch.zeros(SHARDS, 1, ENVS)
    both = nets.unroll(net, weights, data["x"][:, :1], carry, none)
    output, values, carries = nets.unroll(net, weights, data["x"][:, :1], carry, none, actor_only=True)
    half = net.state_size // 2
    assert values is None
    assert torch.equal(output, both[0])
    assert torch.equal(carries[..., :half], both[2][..., :half])
    assert torch.equal(carries[:, 0, :, half:], carry[..., half:])
    assert not torch.equal(both[2][:, 0, :, half:], carry[..., half:])
