"""What PyTorch would launch, counted on shapes."""

import torch

from lockstep.torch_engine.planning.traced import kernels_of, scaled, written
from lockstep.training.costs import Kernel

META = torch.device("meta")


def zeros(*shape):
    return torch.zeros(shape, device=META)


def test_a_product_is_counted_by_its_formula():
    a, b = zeros(8, 16), zeros(16, 4)
    # 2 * 8 * 16 * 4 operations; 128 + 64 + 32 floats
    assert kernels_of(lambda: a @ b) == (Kernel(1024.0, 4.0 * 224, 1.0, "matmul"),)


def test_views_are_free():
    a = zeros(8, 16)
    assert kernels_of(lambda: a.view(16, 8).t()[:3].unsqueeze(0).expand(5, -1, -1)) == ()


def test_an_expanded_axis_is_in_memory_once():
    a = zeros(1, 16).expand(8, 16)
    (kernel,) = kernels_of(lambda: a + 1.0)
    assert kernel == Kernel(128.0, 4.0 * (16 + 128), 1.0)


def test_what_is_looked_up_is_read_not_all_of_it():
    table, index = zeros(1000, 4), torch.zeros(3, dtype=torch.int64, device=META)
    (kernel,) = kernels_of(lambda: table[index])
    assert kernel.bytes == 2 * 3 * 4 * 4 + 3 * 8


def test_results_are_what_a_pass_keeps():
    a = zeros(8, 16)
    assert written(lambda: (a + 1.0).tanh()) == 2 * 8 * 16 * 4


def test_kernels_that_run_often():
    assert scaled((Kernel(1.0, 2.0, 3.0),), 4) == (Kernel(1.0, 2.0, 12.0),)
