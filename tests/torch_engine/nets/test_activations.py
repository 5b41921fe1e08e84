"""Activations of several shards at once have the bits that each shard has alone, at any size."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from lockstep.torch_engine.nets.activations import ACTIVATIONS, fast_activation, shard_by_shard

SIZES = [(1, 1), (1, 20), (2, 17), (3, 33), (5, 40), (8, 64), (7, 100)]


def shards_of(size: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((8, *size), np.float32))


def differing(function, x: torch.Tensor) -> int:
    """Elements whose bits depend on how many shards lie in the tensor."""
    alone = torch.cat([function(part[None].clone()) for part in x])
    return sum(
        int((torch.cat([function(x[s : s + k].clone()) for s in range(0, 8, k)]) != alone).sum()) for k in (2, 4, 8)
    )


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fast", [False, True])
def test_a_shards_bits_do_not_depend_on_its_company(name, size, fast):
    function = fast_activation(name) if fast else ACTIVATIONS[name]
    assert sum(differing(function, shards_of(size, seed)) for seed in range(20)) == 0


def rounded_by_place(x: torch.Tensor) -> torch.Tensor:
    """As vectorised functions of PyTorch do on some processors: what is left over at the end rounds otherwise."""
    flat = x.reshape(-1).clone()
    whole = len(flat) // 8 * 8
    flat[whole:] = torch.nextafter(flat[whole:], torch.tensor(torch.inf))
    return flat.reshape(x.shape)


@pytest.mark.parametrize("size", [(2, 17), (3, 33), (7, 100)])
def test_a_function_whose_bits_depend_on_an_elements_place_is_seen_and_is_steady_shard_by_shard(size):
    x = shards_of(size, 0)
    assert differing(rounded_by_place, x) > 0
    assert differing(shard_by_shard(rounded_by_place), x) == 0


@pytest.mark.parametrize(
    ("name", "reference"), [("elu", functional.elu), ("silu", functional.silu), ("tanh", torch.tanh)]
)
def test_the_values_and_gradients_are_pytorchs(name, reference):
    x = shards_of((5, 17), 0).requires_grad_()
    ours, theirs = ACTIVATIONS[name](x), reference(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)), rtol=1e-6, atol=1e-6)
