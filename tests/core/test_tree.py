"""The tree in which shards meet: who owns what, and that no number of ranks changes an addition."""

from itertools import pairwise

import numpy as np
import pytest

from lockstep.core import tree as module
from lockstep.core.tree import ranges, tree_of

SHARDS, RANKS = range(1, 25), range(1, 14)
TREES = [(shards, ranks) for shards in SHARDS for ranks in RANKS if ranks <= shards]


def rows_of(shards):
    """Float32 numbers of widely different size: ``[shards, 64]``."""
    rng, shape = np.random.default_rng(shards), (shards, 64)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 6, shape)).astype(np.float32)


def summed(rows):
    """The tree as it is said in words: neighbours pairwise, one without a neighbour waits for the next round."""
    while len(rows) > 1:
        paired = rows[0:-1:2] + rows[1::2]
        rows = np.concatenate([paired, rows[-1:]]) if len(rows) % 2 else paired
    return rows[0]


def nodes_of(rows, tree):
    """What the ranks hold once each has added its own, from left to right."""
    return [summed(rows[node.start : node.stop]) for nodes in tree.nodes for node in nodes]


def by_ranks(rows, tree):
    sums = nodes_of(rows, tree)
    for a, b in tree.additions:
        sums[a] = sums[a] + sums[b]
    return sums[0]


def in_order(sums):
    total = sums[0]
    for row in sums[1:]:
        total = total + row
    return total


def test_ranges_are_contiguous_nearly_equal_and_the_longer_ones_first():
    for shards, ranks in TREES:
        owned = tree_of(shards, ranks).owned
        assert owned == ranges(shards, ranks)
        assert [shard for own in owned for shard in own] == list(range(shards))
        lengths = [len(own) for own in owned]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] in (0, 1)
        assert lengths[-1] >= 1


@pytest.mark.parametrize(
    ("shards", "ranks", "lengths"), [(8, 3, [3, 3, 2]), (12, 5, [3, 3, 2, 2, 2]), (7, 7, [1] * 7), (8, 4, [2] * 4)]
)
def test_ranges_by_hand(shards, ranks, lengths):
    tree = tree_of(shards, ranks)
    assert [len(own) for own in tree.owned] == lengths
    assert (tree.most_shards, tree.even) == (lengths[0], len(set(lengths)) == 1)


def test_nodes_by_hand():
    # Eight shards are ((01)(23))((45)(67)): of 0, 1, 2 a rank can add 0 and 1, and 2 waits for 3, which is another's.
    tree = tree_of(8, 3)
    assert tree.nodes == (
        (range(0, 2), range(2, 3)),
        (range(3, 4), range(4, 6)),
        (range(6, 8),),
    )
    assert (tree.counts, tree.most_nodes) == ((2, 2, 1), 2)
    assert tree.additions == ((1, 2), (0, 1), (3, 4), (0, 3))
    assert tree_of(8, 4).additions == ((0, 1), (2, 3), (0, 2))
    assert tree_of(5, 1).additions == ()


def test_the_nodes_of_a_rank_are_its_shards_and_no_two_of_them_could_be_one():
    for shards, ranks in TREES:
        tree, whole = tree_of(shards, ranks), {node for own in tree_of(shards, shards).nodes for node in own}
        parents = pairs_of(shards)
        for owned, nodes in zip(tree.owned, tree.nodes, strict=True):
            assert [shard for node in nodes for shard in node] == list(owned)
            assert set(nodes) <= whole | set(parents)
            assert not any((a, b) in parents.values() for a, b in pairwise(nodes))
        assert len(tree.additions) == sum(tree.counts) - 1
        assert tree.most_nodes <= 2 * max(1, tree.most_shards.bit_length())


def pairs_of(shards):
    """Each sum of the tree as the words say it, with the two that it is made of."""
    nodes, found = [range(i, i + 1) for i in range(shards)], {}
    while len(nodes) > 1:
        pairs = list(zip(nodes[0::2], nodes[1::2], strict=False))
        found |= {range(a.start, b.stop): (a, b) for a, b in pairs}
        nodes = [range(a.start, b.stop) for a, b in pairs] + (nodes[-1:] if len(nodes) % 2 else [])
    return found


def test_any_number_of_ranks_gives_the_bytes_of_one():
    for shards, ranks in TREES:
        rows = rows_of(shards)
        assert by_ranks(rows, tree_of(shards, ranks)).tobytes() == summed(rows).tobytes(), f"{shards} on {ranks}"


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16])
def test_powers_of_two_are_added_in_pairs_as_they_ever_were(shards):
    rows = expected = rows_of(shards)
    while len(expected) > 1:
        expected = expected[0::2] + expected[1::2]
    for ranks in range(1, shards + 1):
        assert by_ranks(rows, tree_of(shards, ranks)).tobytes() == expected[0].tobytes()


@pytest.mark.parametrize(("shards", "ranks"), [(8, 3), (8, 4), (7, 5), (12, 5), (24, 13)])
def test_nodes_that_are_added_in_the_order_of_ranks_have_other_bytes(shards, ranks):
    """The negative of the above."""
    rows, tree = rows_of(shards), tree_of(shards, ranks)
    other = in_order(nodes_of(rows, tree))
    assert other.tobytes() != summed(rows).tobytes()
    magnitude = np.abs(rows).sum(0)
    np.testing.assert_allclose(other / magnitude, summed(rows) / magnitude, atol=1e-5)


def test_what_is_small_and_what_two_ranks_sum_goes_by_one_gather():
    limit = module.SLICED_BYTES
    for shards, ranks in TREES:
        tree = tree_of(shards, ranks)
        assert not tree.sliced(limit // (2 * sum(tree.counts)))
        assert tree.sliced(limit) is (ranks > 2)
