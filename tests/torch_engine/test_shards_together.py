"""Shards whose gradients one call takes: how they are cut, and that the sum over all shards has the same bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import (
    IMAGE_NETS,
    alone,
    described_picture,
    joined,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    small_config,
    small_state,
)

from lockstep.torch_engine.gradients import choose_source, exact_gradient
from lockstep.torch_engine.nets import layers_of_shards
from lockstep.torch_engine.nets.shards import parts_of
from lockstep.torch_engine.setup.invariance import gradients_invariant_here

COUNT = 32


@pytest.mark.parametrize(
    ("shards", "most", "parts"),
    [
        (1, 1, [(0, 1)]),
        (1, 8, [(0, 1)]),
        (2, 1, [(0, 1), (1, 2)]),
        (3, 4, [(0, 2), (2, 3)]),
        (7, 4, [(0, 4), (4, 6), (6, 7)]),
        (8, 4, [(0, 4), (4, 8)]),
        (8, 8, [(0, 8)]),
        (0, 4, []),
    ],
)
def test_shards_are_cut_by_hand(shards, most, parts):
    assert parts_of(shards, most) == parts


@given(st.integers(1, 100), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_every_shard_is_in_one_part_of_a_power_of_two(shards, most):
    parts = parts_of(shards, most)
    assert [shard for first, last in parts for shard in range(first, last)] == list(range(shards))
    sizes = [last - first for first, last in parts]
    assert all(size.bit_count() == 1 and size <= most for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == shards // most + (shards % most).bit_count()  # no fewer would do


@pytest.fixture(params=["by oneDNN", "by the BLAS"])
def who_multiplies(request, monkeypatch):
    """Products of any size by the BLAS where they are alike, which those of small networks aren't tried to be."""
    monkeypatch.setattr(layers_of_shards, "SMALL", 1 if request.param == "by the BLAS" else 1 << 40)
    layers_of_shards.products_alike.cache_clear()
    yield
    layers_of_shards.products_alike.cache_clear()


# so small that ranks of threads, which have no backend, needn't sum by slices
NETS = {"simple": {"image": {"width": 0.25}}, "shared impala": IMAGE_NETS["shared impala"]}


def config_of(net, shards):
    return small_config(num_envs=shards, num_shards=shards, network=NETS[net])


def gradient_of(net, together, shards=8, world_size=1, calls=None):
    """The exact gradient of pictures, from every rank."""
    config = config_of(net, shards)

    def rank(plan, communicator):
        state = small_state(config, described_picture(), plan)
        columns = of_rank(random_batch(config, state.net), plan).columns()
        right = state.policy.gradients

        def watched(columns, settings, out=None):
            if calls is not None:
                calls.append(len(columns["actions"]))
            return right(columns, settings, out)

        state.policy.gradients = watched
        source = exact_gradient(state, config, communicator, "loop", together)
        twice = [joined(source(columns, COUNT)).clone() for _ in range(2)]  # in memory that is used again
        assert torch.equal(*twice)
        return twice[0]

    return run_ranks(config, world_size, rank) if world_size > 1 else [rank(plan_of(config), alone(config))]


@pytest.fixture(scope="module")
def invariant():
    """Skips where a shard's bits would depend on others on this machine, and runs take one shard at a time."""
    for net in NETS:
        config = config_of(net, 8)
        if not gradients_invariant_here(small_state(config, described_picture()), config, 8):
            pytest.skip("shards would depend on others here")


@pytest.mark.usefixtures("who_multiplies")
@pytest.mark.parametrize(
    ("shards", "together", "sizes"),
    [(8, 2, [2] * 4), (8, 4, [4] * 2), (8, 8, [8]), (3, 2, [2, 1]), (3, 4, [2, 1])],
)
@pytest.mark.parametrize("net", NETS)
def test_gradients_of_several_shards_a_call_have_the_bits_of_one_a_call(invariant, net, shards, together, sizes):
    calls: list[int] = []
    (one,) = gradient_of(net, 1, shards, calls=calls)
    assert calls == [1] * shards * 2
    calls.clear()
    assert torch.equal(gradient_of(net, together, shards, calls=calls)[0], one)
    assert calls == sizes * 2


@pytest.mark.usefixtures("who_multiplies")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_more_ranks_have_the_same_bits_with_several_shards_a_call(invariant, world_size):
    """Of 3 ranks two have three shards, which are two calls, and one has two."""
    (one,) = gradient_of("simple", 1)
    assert all(torch.equal(rank, one) for rank in gradient_of("simple", 4, world_size=world_size))


def test_a_shard_that_is_changed_changes_the_sum():
    """The negative of the above: another shard's numbers, and one shard left out."""
    config = config_of("simple", 3)
    state = small_state(config, described_picture())
    source = exact_gradient(state, config, alone(config), "loop", 2)
    columns = random_batch(config, state.net).columns()
    right = joined(source(columns, COUNT)).clone()
    for shard in range(3):
        wrong = {name: x.clone() for name, x in columns.items()}
        wrong["advantages"][shard] *= 2
        assert not torch.allclose(joined(source(wrong, COUNT)), right, rtol=1e-3)


def test_a_run_takes_as_many_together_as_was_chosen(monkeypatch):
    config = config_of("simple", 8)
    state = small_state(config, described_picture())
    calls: list[int] = []
    right = state.policy.gradients

    def watched(columns, settings, out=None):
        calls.append(len(columns["actions"]))
        return right(columns, settings, out)

    monkeypatch.setattr(state.policy, "gradients", watched)
    choose_source(state, config, alone(config), "loop", 4)(random_batch(config, state.net).columns(), COUNT)
    assert calls == [4, 4]
