"""Activations of several shards at once have the bits that each shard has alone, at any size."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from lockstep.torch_engine.nets.activations import ACTIVATIONS, fast_activation

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


def test_pytorchs_own_depend_on_it_at_odd_sizes_or_the_wrapping_is_not_needed_here():
    """The negative: where PyTorch's own functions differ, the test above can see it."""
    plain = [functional.elu, functional.silu, functional.gelu]
    found = sum(differing(f, shards_of(size, seed)) for f in plain for size in SIZES for seed in range(20))
    if not found:
        pytest.skip("on this processor PyTorch's own give the same bits at every position")


@pytest.mark.parametrize(
    ("name", "reference"), [("elu", functional.elu), ("silu", functional.silu), ("tanh", torch.tanh)]
)
def test_the_values_and_gradients_are_pytorchs(name, reference):
    x = shards_of((5, 17), 0).requires_grad_()
    ours, theirs = ACTIVATIONS[name](x), reference(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)), rtol=1e-6, atol=1e-6)
