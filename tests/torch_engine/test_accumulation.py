"""Gradient accumulation: the gradient of the whole minibatch, with the same bits for every number of ranks."""

import pytest
import torch
from small_runs import (
    alone,
    described,
    joined,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    shards_gradients,
    small_config,
    small_state,
)

from lockstep.torch_engine.gradients import (
    exact_gradient,
    fast_gradient,
)
from lockstep.torch_engine.nets.functions import in_pieces
from lockstep.torch_engine.nets.shards import Mode

COUNT = 32
NETS = pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "autograd"])


def config_of(pieces, activation, reduction="exact"):
    ppo = {"gradient_accumulation": pieces, "num_minibatches": 1}
    return small_config(num_shards=4, ppo=ppo, network={"activation": activation}, reduction=reduction)


def gradient_of(pieces, activation, world_size=1, mode: Mode = "loop"):
    """The exact gradient, from every rank."""
    config = config_of(pieces, activation)

    def rank(plan, communicator):
        state = small_state(config, described(), plan)
        columns = of_rank(random_batch(config, state.net), plan).columns()
        return joined(exact_gradient(state, config, communicator, mode)(columns, COUNT))

    return run_ranks(config, world_size, rank) if world_size > 1 else [rank(plan_of(config), alone(config))]


@pytest.mark.parametrize("mode", ["loop", "batched"])
@pytest.mark.parametrize("pieces", [2, 4, 8])
@NETS
def test_accumulated_gradients_are_those_of_the_whole_minibatch(activation, pieces, mode):
    (whole,), (parts,) = gradient_of(1, activation), gradient_of(pieces, activation, mode=mode)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    (other,) = gradient_of(1, "elu")
    assert not torch.allclose(other, whole, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@NETS
def test_accumulated_gradients_have_the_same_bits_on_more_ranks(activation, world_size):
    (one,) = gradient_of(4, activation)
    assert all(torch.equal(rank, one) for rank in gradient_of(4, activation, world_size))
    assert not torch.equal(gradient_of(2, activation)[0], one)


@NETS
def test_the_networks_see_one_piece_at_a_time(monkeypatch, activation):
    rows = []
    config = config_of(4, activation)
    state = small_state(config, described())
    right = state.policy.gradients

    def watched(columns, settings, out=None):
        rows.append({x.shape[1] for x in columns.values()})
        return right(columns, settings, out)

    monkeypatch.setattr(state.policy, "gradients", watched)
    shards_gradients(state, config)(random_batch(config, state.net).columns(), COUNT)
    assert rows == [{2}] * 4


@pytest.mark.parametrize("pieces", [2, 4])
def test_ddp_accumulates_too(monkeypatch, pieces):
    config, whole = config_of(pieces, "silu", "fast"), config_of(1, "silu", "fast")
    state = small_state(config, described())
    columns = random_batch(config, state.net).columns()
    parts, at_once = (joined(fast_gradient(state, c, alone(c))(columns, COUNT)) for c in (config, whole))
    torch.testing.assert_close(parts, at_once, rtol=1e-5, atol=1e-6)
    calls = []
    from lockstep.torch_engine import gradients

    right = gradients.minibatch_loss
    monkeypatch.setattr(gradients, "minibatch_loss", lambda *a: (calls.append(a[2]["actions"].shape), right(*a))[1])
    fast_gradient(state, config, alone(config))(columns, COUNT)
    assert calls == [(1, 32 // pieces)] * pieces


def test_pieces_have_dropouts_of_their_own():
    columns = {"actions": torch.arange(8).view(1, 8), "dropout_seed": torch.tensor([[7]])}
    pieces = in_pieces(columns, 4)
    assert [int(piece["dropout_seed"]) for piece in pieces] == [7, 8, 9, 10]
    assert torch.equal(torch.cat([piece["actions"] for piece in pieces], 1), columns["actions"])
