"""What a kernel takes is the longest of three times."""

import pytest

from lockstep.planning.hardware import assumptions, chips
from lockstep.planning.roofline import Roofline
from lockstep.training.costs import Kernel, Part

ROOF = Roofline({"matmul": 100.0, "vector": 10.0}, 5.0, 1.0)


@pytest.mark.parametrize(
    ("kernel", "seconds", "limit"),
    [
        (Kernel(500.0, 5.0, 1, "matmul"), 5.0, "compute"),
        (Kernel(500.0, 5.0, 1, "vector"), 50.0, "compute"),
        (Kernel(100.0, 20.0, 1, "matmul"), 4.0, "memory"),
        (Kernel(1.0, 1.0, 1, "matmul"), 1.0, "launches"),
    ],
)
def test_the_longest_counts(kernel, seconds, limit):
    assert ROOF.kernel(kernel) == (pytest.approx(seconds), limit)


def test_a_part_sums_its_kernels_by_what_limits_them():
    part = Part("gradients", (Kernel(500.0, 5.0, 2, "matmul"), Kernel(0.0, 20.0, 3), Kernel(0.0, 0.0, 7)), "size")
    assert ROOF.part(part) == {"compute": 10.0, "memory": 12.0, "launches": 7.0}


def test_kernels_that_run_beside_one_another_save_launches_alone():
    part = Part("gradients", (Kernel(500.0, 5.0, 2, "matmul"), Kernel(0.0, 20.0, 3), Kernel(0.0, 0.0, 8)), "count")
    assert ROOF.part(part, 4) == {"compute": 10.0, "memory": 12.0, "launches": 2.0}


def test_a_chips_roof_is_its_peaks_times_what_is_assumed():
    chip, assumed = chips()["h100"], assumptions("likely")
    roof = Roofline.of(chip, "torch", assumed)
    assert roof.compute["matmul_bf16"] == 989e12 * assumed.compute
    assert roof.compute["matmul"] == roof.compute["vector"] == 67e12 * assumed.compute
    assert roof.memory == 3350e9 * assumed.memory
    assert roof.launch == assumed.kernel["torch:cuda"]
