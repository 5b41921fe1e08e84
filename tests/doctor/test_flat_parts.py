"""Vectors that an optimiser updates: parts of a model, or parameters of their own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.doctor.watch.torch.flat_parts import is_whole, parts_of, updated_by_parts

SIZE = 4 * 16 + 16 + 16 + 1


def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))


def found(net, *tensors, ranks=2):
    optimizer = torch.optim.SGD([tensor.requires_grad_() for tensor in tensors], lr=0.1)
    return updated_by_parts(optimizer, [net, nn.Linear(2, 2)], {id(p) for p in net.parameters()}, (), ranks)


@pytest.mark.parametrize(
    ("tensors", "ranks"),
    [
        ([torch.zeros(49)], 2),
        ([torch.zeros(40), torch.zeros(9)], 2),  # two groups
        ([torch.zeros(48)], 2),  # without padding, of the rank whose part is the smaller one
        ([torch.zeros(38), torch.zeros(9)], 2),
        ([torch.zeros(49)], 3),
    ],
)
def test_a_rank_s_part_of_a_model_is_known_by_its_size(tensors, ranks):
    net = model()
    assert [id(p) for p in found(net, *tensors, ranks=ranks)] == [id(p) for p in net.parameters()]


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(SIZE)],  # the whole
        [torch.zeros(())],  # the logarithm of a temperature
        [torch.zeros(6)],  # of standard deviations
        [torch.zeros(47)],
        [torch.zeros(7, 7)],
        [torch.zeros(49), torch.zeros(2, 2)],
    ],
)
def test_parameters_outside_of_modules_are_no_parts(tensors):
    assert found(model(), *tensors) == []


def test_a_model_that_another_optimiser_updates_is_updated_by_no_parts():
    net = model()
    optimizer = torch.optim.SGD([torch.zeros(49, requires_grad=True)], lr=0.1)
    assert updated_by_parts(optimizer, [net], (), {id(p) for p in net.parameters()}, 2) == []
    assert (
        updated_by_parts(torch.optim.SGD(net.parameters(), lr=0.1), [net], {id(p) for p in net.parameters()}, (), 2)
        == []
    )


def test_empty_parameters_count_by_the_size_that_they_have_elsewhere():
    net = model()
    for parameter in net.parameters():
        parameter.ds_numel = parameter.numel()  # pyright: ignore[reportAttributeAccessIssue]
        parameter.data = torch.empty(0)
    assert len(found(net, torch.zeros(49))) == 4
    assert not any(is_whole(parameter) for parameter in net.parameters())


def test_parameters_that_are_marked_are_known_by_one_group_of_parts_and_experts_are_each_rank_s_own():
    net, part, other = model(), torch.zeros(3), torch.zeros(1)
    first, *others = net.parameters()
    for parameter in others:
        parameter._hp_mapping = None  # pyright: ignore[reportAttributeAccessIssue]
    mapping = SimpleNamespace(hp_fragment=part[1:])
    others[0]._hp_mapping = mapping  # pyright: ignore[reportAttributeAccessIssue]
    others[1].allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
    assert [id(p) for p in found(net, part)] == [id(others[0]), id(others[2])]
    assert found(net, torch.zeros(2, 2)) == []
    optimizer = torch.optim.SGD([part, other.requires_grad_()], lr=0.1)
    assert [id(p) for p in parts_of(optimizer, others)] == [id(part)]
    assert len(parts_of(optimizer, [first])) == 2


def test_vectors_beside_the_parts_of_zero_3_are_no_parts():
    net, part, other = model(), torch.zeros(3), torch.zeros(1)
    part.ds_id = "0_3"  # pyright: ignore[reportAttributeAccessIssue]
    for parameter in net.parameters():
        parameter.ds_numel = parameter.numel()  # pyright: ignore[reportAttributeAccessIssue]
    for vectors, parts in (([part], 1), ([other], 0), ([part, other], 1)):
        optimizer = torch.optim.SGD([vector.requires_grad_() for vector in vectors], lr=0.1)
        assert [id(p) for p in parts_of(optimizer, list(net.parameters()))] == [id(part)] * parts
