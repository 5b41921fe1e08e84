"""Sums over shards in memory, by one gather or by slices, and what they cost; ranks are threads of this process.

``tests/distributed/test_sharing_ranks.py`` has real ranks, and a backend's collectives.
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.core import tree as trees
from lockstep.core.tree import tree_of
from lockstep.torch_engine.distributed import ordered
from lockstep.torch_engine.distributed.ordered import (
    Traffic,
    bounds,
    finished,
    own_nodes,
    sum_in_memory,
    traffic,
    tree_sum,
)
from lockstep.torch_engine.distributed.shared_memory import SharedSlots, obstacle

NEEDS_MEMORY = pytest.mark.skipif(obstacle() is not None, reason=f"shared memory: {obstacle()}")
MEGABYTES = 4 << 20  # of a million float32
SLOT = 1 << 10  # bytes


def spread(shards, size):
    """Float32 numbers of widely different size: ``[shards, size]``."""
    generator = torch.Generator().manual_seed(shards)
    powers = torch.empty(shards, size).uniform_(-6, 6, generator=generator)
    return torch.randn(shards, size, generator=generator) * 10**powers


@pytest.fixture
def sum_over(monkeypatch):
    """Sums rows through memory as each of several ranks; ``sliced`` says how, whatever the size."""

    def summed(x, ranks, sliced):
        monkeypatch.setattr(trees, "SLICED_BYTES", 0 if sliced else 1 << 60)
        tree = tree_of(len(x), ranks)
        memory = mmap.mmap(-1, SharedSlots.bytes_needed(ranks, SLOT))

        def rank_of(rank):
            torch.set_num_threads(1)
            processes = [os.pidfd_open(os.getpid()) for _ in range(ranks)]
            slots = SharedSlots(rank, ranks, memory, processes, 60.0, SLOT)
            own = own_nodes(x[list(tree.owned[rank])], tree, rank)
            found = [sum_in_memory(own, tree, slots) for _ in range(3)]  # in both buffers, one upon the other
            slots.close()
            return found

        with ThreadPoolExecutor(ranks) as pool:
            return [total for found in pool.map(rank_of, range(ranks)) for total in found]

    return summed


@NEEDS_MEMORY
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("shards", [7, 8, 12])
@pytest.mark.parametrize("sliced", [False, True], ids=["gathered", "by slices"])
def test_sums_in_memory_have_the_bytes_of_one_rank(sum_over, shards, ranks, sliced):
    for size in (1, 16, 257, 1000):
        x = spread(shards, size)
        sums = sum_over(x, ranks, sliced)
        assert len(sums) == 3 * ranks
        assert all(total.numpy().tobytes() == tree_sum(x).numpy().tobytes() for total in sums), size


@NEEDS_MEMORY
@pytest.mark.parametrize("sliced", [False, True], ids=["gathered", "by slices"])
def test_nodes_that_are_added_from_left_to_right_would_show(sum_over, monkeypatch, sliced):
    """The negative of the above."""
    monkeypatch.setattr(ordered, "finished", lambda parts, tree, out=None: sum(parts[1:], parts[0]))
    x = spread(8, 257)
    assert not any(torch.equal(total, tree_sum(x)) for total in sum_over(x, 3, sliced))


@NEEDS_MEMORY
def test_slices_of_nothing_and_of_other_types(sum_over):
    for x in (spread(8, 0), spread(8, 100).double(), torch.arange(8 * 77).view(8, 77)):
        for sliced in (False, True):
            assert all(total.equal(tree_sum(x)) for total in sum_over(x, 3, sliced))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100, 4096, 100_003])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_slices_are_all_elements_once_and_in_order(size, ranks):
    cut = bounds(size, ranks)
    assert [i for first, last in cut for i in range(first, last)] == list(range(size))
    assert len(cut) == ranks
    assert all(first % ordered.LINE_ELEMENTS == 0 or first == size for first, _ in cut)
    assert max(last - first for first, last in cut) <= -(-size // ranks) + ordered.LINE_ELEMENTS


def test_the_nodes_of_ranks_are_finished_to_the_sum_of_one():
    for shards in range(1, 25):
        x = spread(shards, 16)
        for ranks in range(1, shards + 1):
            tree = tree_of(shards, ranks)
            nodes = [own_nodes(x[list(own)], tree, rank) for rank, own in enumerate(tree.owned)]
            assert [len(own) for own in nodes] == list(tree.counts)
            assert torch.equal(finished(list(torch.cat(nodes)), tree), tree_sum(x))


# ---- how much travels


@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 7, 8])
def test_a_large_sum_costs_about_a_ring(ranks):
    tree = tree_of(8, ranks)
    most = 2.1 if ranks in (4, 8) else tree.most_nodes + 1
    assert tree.most_nodes <= 2
    for rank in range(ranks):
        moved = traffic(tree, rank, MEGABYTES)
        assert 0 < max(moved) <= most * MEGABYTES


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_gather_would_cost_more_with_every_rank(monkeypatch, ranks):
    """The negative of the above."""
    monkeypatch.setattr(trees, "SLICED_BYTES", 1 << 60)
    assert traffic(tree_of(8, ranks), 0, MEGABYTES) == Traffic(MEGABYTES, (ranks - 1) * MEGABYTES)
    assert (ranks - 1) * MEGABYTES > 2.1 * MEGABYTES


def test_what_all_ranks_send_is_what_all_receive_of_a_sum_by_slices():
    for ranks in range(3, 9):
        tree = tree_of(8, ranks)
        sent, received = zip(*(traffic(tree, rank, MEGABYTES) for rank in range(ranks)), strict=True)
        assert sum(sent) == pytest.approx(sum(received), abs=ranks)


def test_two_ranks_exchange_what_they_hold():
    assert traffic(tree_of(8, 2), 1, MEGABYTES) == Traffic(MEGABYTES, MEGABYTES)
    assert traffic(tree_of(7, 2), 0, MEGABYTES) == traffic(tree_of(7, 2), 1, MEGABYTES)[::-1]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_much_is_summed_by_parts_to_the_same_bits_where_it_lies(monkeypatch, shards):
    monkeypatch.setattr(ordered, "CACHED_ELEMENTS", 16)
    for ranks in range(1, shards + 1):
        tree, x = tree_of(shards, ranks), spread(shards, 50)
        nodes = []
        for rank, owned in enumerate(tree.owned):
            own = x[list(owned)]
            nodes.append(own_nodes(own, tree, rank))
            if len(tree.nodes[rank]) == 1:
                assert nodes[-1].data_ptr() == own.data_ptr()
        assert torch.equal(finished(list(torch.cat(nodes)), tree), tree_sum(x))
    little = spread(shards, 16)
    before = little.clone()
    own_nodes(little, tree_of(shards, 1), 0)
    assert torch.equal(little, before)
