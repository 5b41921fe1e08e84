"""A weight's transpose as a factor: where it is copied, products have the bits of the one that isn't."""

import numpy as np
import pytest

from lockstep.torch_engine.plain.layers import factor

INPUTS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 27, 31, 32, 33, 45, 64, 65, 100, 128)
OUTPUTS = (64, 128, 192, 256, 512, 1024, 2048)
ROWS = (1, 2, 3, 4, 5, 8, 16, 20, 31, 32, 33, 37, 64, 100, 128, 250, 256, 512, 1024)


def copied(outputs: int, inputs: int, rows: int) -> bool:
    return factor(np.zeros((outputs, inputs), np.float32).T, rows).flags.c_contiguous


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_products_with_a_copy_have_the_same_bits(outputs: int, scale: float) -> None:
    rng, compared = np.random.default_rng(outputs), 0
    for inputs in INPUTS:
        weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
        for rows in ROWS:
            if inputs > 1 and copied(outputs, inputs, rows):
                x = scale * rng.standard_normal((2, rows, inputs)).astype(np.float32)
                product = np.matmul(x, factor(weight.T, rows))
                np.testing.assert_array_equal(product, np.matmul(x, weight.T))
                np.testing.assert_array_equal(product[1:], np.matmul(x[1:], factor(weight.T, rows)))
                compared += 1
    assert compared > 20


def test_where_a_weight_is_copied() -> None:
    assert copied(64, 64, 32)
    assert copied(64, 17, 8)
    assert copied(128, 64, 256)
    assert not copied(64, 64, 31)  # another order of the sum
    assert not copied(64, 17, 1)  # likewise
    assert not copied(2048, 4, 1)  # likewise
    assert not copied(48, 64, 64)  # likewise, in the columns that are left over
    assert not copied(256, 256, 64)  # it would take longer than it saves
