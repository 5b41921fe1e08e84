"""Tensors of ranks against one another."""

import numpy as np
import pytest

from lockstep.doctor.judge.compare import (
    compare_parts,
    comparisons,
    inputs_at,
    relative_difference,
    same,
)
from lockstep.doctor.judge.phases import phase_lengths
from lockstep.doctor.judge.traces import Check, Kept, Moment, RankTrace

AT = Moment(0, 1, "after")


def kept(*numbers, elements=None, shards=0, digest=""):
    values = np.array(numbers, np.float32)
    return Kept(values, len(values) if elements is None else elements, shards, digest)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (kept(1, 2), kept(1, 2), True),
        (kept(1, np.nan), kept(1, np.nan), True),
        (kept(1, 2), kept(1, np.nextafter(np.float32(2), np.float32(3))), False),
        (kept(1, np.nan), kept(1, 0), False),
        (kept(1, elements=9, digest="a"), kept(1, elements=9, digest="b"), False),
        (kept(1, 2), kept(1, 2, 3), False),
    ],
)
def test_equal_means_every_bit(a, b, equal):
    assert same(a, b) is equal


@pytest.mark.parametrize(
    ("a", "b", "size"),
    [
        (kept(1, 4), kept(1, 2), 0.5),
        (kept(0, 0), kept(0, 0), np.nan),
        (kept(0, np.inf), kept(0, 1), np.inf),
        (kept(np.inf, 2), kept(np.inf, 1), 0.5),
        (kept(np.nan), kept(1), np.inf),
        (kept(1), kept(1, 2), np.inf),
    ],
)
def test_differences_are_relative_to_the_largest_element(a, b, size):
    assert relative_difference(a, b) == pytest.approx(size, nan_ok=True)


def test_a_comparison_names_tensors_and_ranks():
    ranks = {0: {"a": kept(1), "b": kept(2)}, 1: {"a": kept(1), "b": kept(2)}, 3: {"a": kept(1), "b": kept(1)}}
    found = compare_parts("parameters", AT, ranks)
    assert (found.compared, found.differing, found.ranks, found.relative) == (2, ("b",), (3,), 0.5)
    assert not found.equal
    assert compare_parts("parameters", AT, {0: ranks[0], 1: ranks[1]}).equal


def test_shards_and_what_one_rank_alone_has_are_left_out():
    ranks = {0: {"a": kept(1, shards=2), "b": kept(2), "c": kept(0)}, 1: {"a": kept(3, shards=2), "b": kept(2)}}
    found = compare_parts("buffers", AT, ranks)
    assert (found.compared, found.sharded, found.differing, found.nonzero) == (1, 1, (), True)


@pytest.mark.parametrize("kind", ["parameters", "gradients"])
def test_what_one_rank_alone_has_of_an_optimizers_is_a_difference(kind):
    ranks = {0: {"0.0": kept(1)}, 1: {"0.0": kept(1), "0.1": kept(2)}, 2: {"0.0": kept(1)}}
    found = compare_parts(kind, AT, ranks, {})
    assert (found.compared, found.differing, found.ranks) == (2, ("parameter 1 of group 0",), (1,))
    assert found.relative == np.inf
    assert not compare_parts(kind, AT, {0: ranks[0], 2: ranks[2]}).differing


def test_moments_that_one_rank_alone_has_are_sharded_ones():
    found = compare_parts("moments", AT, {0: {"0.0.m": kept(1)}, 1: {"0.0.m": kept(1), "0.1.m": kept(2)}})
    assert (found.compared, found.sharded, found.differing) == (1, 1, ())


def traced(names, values):
    """A rank whose one optimiser holds these values, in this order, by these names."""
    part = {f"0.{place}": kept(value) for place, value in enumerate(values)}
    return RankTrace(0, checks={AT: Check({"parameters": part}, {})}, names={0: names})


def test_groups_may_have_another_order_on_every_rank():
    one, other = traced({"0.0": "a", "0.1": "b"}, (1, 2)), traced({"0.0": "b", "0.1": "a"}, (2, 1))
    other.rank = 1
    (found,) = comparisons([one, other], set())
    assert found.differing == ()
    other.names = {0: {"0.0": "a", "0.1": "c"}}  # other names tell nothing
    (found,) = comparisons([one, other], set())
    assert found.differing == ("a", "b")


def test_tensors_are_told_by_the_names_of_their_places():
    ranks = {0: {"0.1": kept(1), "0.1.exp_avg": kept(1)}, 1: {"0.1": kept(2), "0.1.exp_avg": kept(3)}}
    assert compare_parts("moments", AT, ranks, {"0.1": "net.bias"}).differing == ("net.bias", "net.bias.exp_avg")
    assert compare_parts("buffers", AT, {0: {"0.1.mean": kept(1)}, 1: {"0.1.mean": kept(2)}}).differing == ("0.1.mean",)


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (("a", "b"), "differ"),
        (("a,b", "b,c"), "differ"),
        (("a", "a", "b"), "differ"),
        (("a,b", "a", "a,b,c"), "equal"),
        (("a", "a"), "equal"),
        (("x,y", "x,graph,y"), "equal"),
        (("a,b,a,c", "a,c,b"), "differ"),  # few states, met in another order and by other counts
        (("a,a,b", "a,b,b"), "differ"),
        (("a,b", "b,a"), "equal"),
        (("a", ""), "unseen"),
    ],
)
def test_what_one_rank_had_in_addition_is_no_other_data(inputs, word):
    ranks = [RankTrace(rank, checks={AT: Check({}, {"inputs": each})}) for rank, each in enumerate(inputs)]
    assert inputs_at(ranks, AT) == word


def test_phases_are_as_long_as_the_steps_between_their_beginnings():
    assert phase_lengths([4, 8, 9]) == [4, 4, 1]
    assert phase_lengths([]) == []
