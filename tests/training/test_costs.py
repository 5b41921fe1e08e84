"""Costs of an iteration: what further shards add, and that JSON keeps them."""

import json

from lockstep.training.costs import Collective, Costs, Kernel, Part, merged

PART = Part("gradients", (Kernel(10.0, 4.0, 3.0, "matmul"), Kernel(1.0, 2.0, 5.0)), "size")


def test_a_part_sums_its_kernels():
    assert (PART.flops, PART.bytes, PART.calls) == (35.0, 22.0, 8.0)


def test_further_shards_make_kernels_larger_or_more_or_nothing():
    larger = PART.of_shards(4, 2)
    assert (larger.flops, larger.bytes, larger.calls) == (70.0, 44.0, 8.0)
    more = Part("gradients", PART.kernels, "count").of_shards(4, 2)
    assert (more.flops, more.bytes, more.calls) == (70.0, 44.0, 16.0)
    assert Part("optimizer", PART.kernels, "not").of_shards(4, 2).calls == 8.0


def test_a_part_may_have_a_size_below_which_it_is_not():
    lone = Part("rollout", PART.kernels, "size", 4, at_least=2)
    assert [lone.of_shards(n, 4).flops for n in (1, 2, 4, 8)] == [17.5, 17.5, 35.0, 70.0]


def test_kernels_that_are_alike_are_one():
    kernel = Kernel(1.0, 2.0, 3.0)
    other = Kernel(1.0, 2.0, 3.0, "matmul")
    assert merged([kernel, other, kernel]) == (Kernel(1.0, 2.0, 6.0), other)


def test_json_keeps_costs():
    sent = (Collective("all-gather", "gradients", 1.0, 2.0),)
    costs = Costs(2, (PART,), {"parameters": 8.0}, {1: {"parameters": 16.0}}, sent, True, "shapes")
    assert Costs.of_json(json.loads(json.dumps(costs.to_json()))) == costs
