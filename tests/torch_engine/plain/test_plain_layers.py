"""Layers of plain policies: what is computed by faster calls has the bits of the plain expression."""

import numpy as np
import pytest

from lockstep.torch_engine.plain import layers
from lockstep.torch_engine.plain.layers import add_bias, layers_in, outer, width_of


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 3, 64, 600])
@pytest.mark.parametrize("leading", [(8, 64), (7, 73)])
def test_a_bias_is_added_to_every_row(width: int, leading: tuple[int, ...]) -> None:
    x, bias = drawn(*leading, width), drawn(1, width)
    expected = x + bias
    add_bias(x, bias)
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("width", [1, 2, 17, 64, 100])
@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 256])
def test_columns_times_a_row(monkeypatch: pytest.MonkeyPatch, rows: int, width: int) -> None:
    columns, row, out = drawn(3, rows, 1), drawn(1, width), np.empty((3, rows, width), np.float32)
    columns[1] = 0.0
    assert outer(columns, row, out) is out
    np.testing.assert_array_equal(out, columns * row)
    np.testing.assert_array_equal(outer(columns, row), columns * row)
    products = []
    monkeypatch.setattr(np, "matmul", lambda *given, out=None: products.append(given))
    outer(columns, row)
    assert len(products) == (rows >= layers.FEW_ROWS)


def test_columns_of_several_networks_times_their_rows() -> None:
    columns, rows = drawn(2, 3, 64, 1), drawn(2, 1, 1, 5)
    np.testing.assert_array_equal(outer(columns, rows), columns * rows)


def test_layers_lie_one_after_another() -> None:
    memory = np.arange(2.0 * 3 * 22).reshape(2, 3, 22)
    assert width_of((3, 4, 1)) == 21
    (first, bias), (last, its_bias) = layers_in(memory, (3, 4, 1))
    assert [x.shape for x in (first, bias, last, its_bias)] == [(2, 3, 4, 3), (2, 3, 1, 4), (2, 3, 1, 4), (2, 3, 1, 1)]
    np.testing.assert_array_equal(first[1, 2].ravel(), memory[1, 2, :12])
    np.testing.assert_array_equal(its_bias[0, 1].ravel(), memory[0, 1, 20:21])
    assert all(np.shares_memory(x, memory) for x in (first, bias, last, its_bias))
