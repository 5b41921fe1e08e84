"""Sums over shards: one fixed tree, whatever the number of ranks; and what a single rank's collectives return."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import alone, run_ranks, small_config

from lockstep.torch_engine.distributed.ordered import tree_sum

SHARDS = 8


def spread(seed: int, shards: int = SHARDS) -> torch.Tensor:
    """Float32 numbers of different size, so that the order in which they are added shows: `[shards, 16]`."""
    rng, shape = np.random.default_rng(seed), (shards, 16)
    return torch.from_numpy((rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2, shape)).astype(np.float32))


def test_the_tree_by_hand():
    # Neighbours first: (1 + 2^24) + (-2^24 + 1) = 2^24 - 2^24 + 1, because 1 + 2^24 rounds to 2^24.
    # From left to right: ((1 + 2^24) - 2^24) + 1 = 1.
    big = 2.0**24
    x = torch.tensor([1.0, big, -big, 1.0])
    assert tree_sum(x).item() == 1.0
    assert tree_sum(torch.tensor([1.0, big, 1.0, -big])).item() == 1.0
    assert tree_sum(torch.tensor([big, -big, 1.0, 1.0])).item() == 2.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shards", [2, 3, 8])
def test_what_is_not_finite_is_summed_in_silence(shards):
    x = torch.ones(shards, 3)
    x[0], x[1] = torch.tensor([torch.inf, 3e38, torch.nan]), torch.tensor([-torch.inf, 3e38, 1.0])
    assert not tree_sum(x).isfinite().any()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_tree_is_a_sum(seed, shards):
    x = spread(seed, shards)
    result = tree_sum(x)
    assert result.shape == (16,)
    np.testing.assert_allclose(result.numpy(), x.double().sum(0).numpy(), rtol=1e-5, atol=1e-6 * float(x.abs().max()))


@given(st.lists(st.integers(-1000, 1000), min_size=SHARDS, max_size=SHARDS))
def test_the_tree_of_whole_numbers_is_exact(numbers):
    assert tree_sum(torch.tensor(numbers)).item() == sum(numbers)


@given(st.integers(0, 2**32 - 1))
def test_the_tree_of_ranks_own_subtrees_is_the_tree_of_shards_bit_for_bit(seed):
    x = spread(seed)
    whole = tree_sum(x)
    for world_size in (1, 2, 4, 8):
        partial = torch.stack([tree_sum(part) for part in x.chunk(world_size)])
        assert torch.equal(tree_sum(partial), whole)


def test_another_order_has_other_bits():
    """The negative of the above: were the order free, a bitwise test of it would fail."""
    x = spread(0)
    whole = tree_sum(x)
    in_sequence = x[0]
    for part in x[1:]:
        in_sequence = in_sequence + part
    interleaved = tree_sum(torch.stack([tree_sum(x[rank::2]) for rank in range(2)]))
    for other in (in_sequence, interleaved):
        assert not torch.equal(other, whole)
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-2)


@given(st.integers(0, 2**32 - 1), st.sampled_from([5, SHARDS, 12]), st.data())
def test_sum_shards_has_the_same_bits_for_every_world_size(seed, shards, data):
    x, config = spread(seed, shards), small_config(num_envs=shards, num_shards=shards)
    world_size = data.draw(st.integers(2, shards))
    sums = run_ranks(config, world_size, lambda plan, communicator: communicator.sum_shards(x[list(plan.shards)]))
    expected = alone(config).sum_shards(x)
    assert all(torch.equal(ours, expected) for ours in sums)


def test_a_single_rank_gathers_what_it_has_and_counts_no_collective():
    communicator, x = alone(small_config()), spread(1)
    assert torch.equal(communicator.gather_shards(x), x)
    assert torch.equal(communicator.gather_ranks(x), x.unsqueeze(0))
    assert torch.equal(communicator.all_reduce(x.clone()), x)
    assert communicator.alone
    assert (communicator.calls, communicator.traffic, communicator.take_durations()) == (0, (0, 0), [])


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_shards_are_gathered_in_their_order(world_size):
    x, config = spread(2), small_config(num_envs=SHARDS)
    of_ranks = run_ranks(
        config, world_size, lambda plan, communicator: communicator.gather_shards(x[list(plan.shards)])
    )
    assert all(torch.equal(ours, x) for ours in of_ranks)


@pytest.mark.parametrize("payload", [b"", b"\x00", b"abc\xff" * 1000])
def test_bytes_come_back_as_they_were(payload):
    assert alone(small_config()).gather_bytes(payload) == [payload]


@pytest.mark.parametrize("value", [None, [], {"a": [1, 2.5, "ü"]}, "text"])
def test_json_comes_back_as_it_was(value):
    assert alone(small_config()).gather_json(value) == [value]
