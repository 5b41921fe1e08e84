"""Products of shards' few rows: a shard's bits are those of its own rows, whoever is beside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.machine import openblas_kernel
from lockstep.torch_engine.plain import products
from lockstep.torch_engine.plain.products import FEW_ROWS, NARROW, PAIRED, RowProduct, joins, laid_out, pairs


@pytest.fixture
def compared_anew():
    """Comparisons are made in the test, and again after it."""
    pairs.cache_clear()
    joins.cache_clear()
    yield
    pairs.cache_clear()
    joins.cache_clear()


def drawn(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def multiplied(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return RowProduct(weights, *rows.shape[1:3])(np.ascontiguousarray(rows)).copy()


def assert_alone_as_together(x: np.ndarray, weights: np.ndarray) -> None:
    together = multiplied(x, weights)
    np.testing.assert_allclose(together, x @ weights[:, None], rtol=1e-3, atol=1e-4)
    for shard in range(x.shape[1]):
        np.testing.assert_array_equal(multiplied(x[:, shard : shard + 1], weights), together[:, shard : shard + 1])


@given(
    shards=st.sampled_from([1, 2, 3, 4, 8, 16]),
    rows=st.sampled_from([1, 2, 3, 4, 7, FEW_ROWS, FEW_ROWS + 1]),
    inputs=st.sampled_from([1, 4, 17, 64, 128, 256, 376]),
    outputs=st.sampled_from([1, 2, 6, 17, 48, 64, 192, 256, 512, 576]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_shards_bits_are_those_it_has_alone(shards, rows, inputs, outputs, transposed, seed):
    weights = drawn(2, outputs, inputs, seed=seed).swapaxes(1, 2)
    x = drawn(2, shards, rows, inputs, seed=seed + 1)
    assert_alone_as_together(x, laid_out(weights) if transposed else weights.copy())


@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "copied"])
@pytest.mark.parametrize(
    ("shards", "rows", "inputs", "outputs"),
    [
        (8, 2, 160, 480),  # the hidden weight of a GRU
        (8, 2, 192, 576),
        (8, 12, 64, 17),
        (8, 16, 64, 17),
        (8, 2, 376, 256),
        (4, 3, 4, 1),  # differs in few numbers
        (2, 3, 4, 1),
        (3, 1, 4, 1),
    ],
)
def test_shapes_whose_bits_depended_on_other_shards(shards, rows, inputs, outputs, transposed):
    """With kernels for AVX-512: of transposed weights, because others had been compared, or of few outputs."""
    for seed in range(10):
        weights = drawn(2, outputs, inputs, seed=seed).swapaxes(1, 2)
        x = drawn(2, shards, rows, inputs, seed=seed + 1)
        assert_alone_as_together(x, laid_out(weights) if transposed else weights.copy())


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of the rows that are multiplied, but not those of comparisons."""
    seen, matmul = [], np.matmul

    def noted(a, b, out=None):
        if out is not None:
            seen.append(a.shape)
        return matmul(a, b, out=out)

    monkeypatch.setattr(np, "matmul", noted)
    return seen


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("rows", [1, 3])
def test_shards_whose_rows_cant_be_one_factor_are_multiplied_apart(monkeypatch, shapes, rows, together):
    monkeypatch.setattr(products, "pairs", lambda *_: True)
    monkeypatch.setattr(products, "joins", lambda *_: together)
    multiplied(drawn(2, 8, rows, 64), drawn(2, 64, 256))
    assert shapes == [(2, 8 * rows, 64) if together else (2, 8, max(2, rows), 64)]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_weight_that_is_transposed_is_multiplied_shard_by_shard(monkeypatch, shapes, rows):
    """What was compared is one that isn't."""
    monkeypatch.setattr(products, "pairs", lambda *_: False)
    monkeypatch.setattr(products, "joins", lambda *_: True)
    multiplied(drawn(2, 8, rows, 64), laid_out(drawn(2, 256, 64).swapaxes(1, 2)))
    assert shapes == [(2, 8, rows, 64)]


@pytest.mark.parametrize("rows", [1, 3])
def test_both_ways_have_the_same_bits_where_one_is_chosen(monkeypatch, shapes, rows):
    """So a check that fails on one rank alone makes no other agent."""
    weights, x = drawn(2, 64, 256), drawn(2, 8, rows, 64, seed=1)
    expected = multiplied(x, weights)
    monkeypatch.setattr(products, "joins", lambda *_: False)
    np.testing.assert_array_equal(multiplied(x, weights), expected)
    if openblas_kernel() == "SkylakeX":
        assert shapes[0] != shapes[1]


def test_a_lone_row_is_multiplied_as_it_is_where_rows_cant_be_one_factor(monkeypatch, shapes):
    monkeypatch.setattr(products, "pairs", lambda *_: False)
    monkeypatch.setattr(products, "joins", lambda *_: True)
    multiplied(drawn(2, 8, 1, 64), drawn(2, 64, 256))
    assert shapes == [(2, 8, 1, 64)]


@pytest.mark.usefixtures("compared_anew")
def test_what_isnt_compared_isnt_joined(monkeypatch):
    assert not joins(8, FEW_ROWS + 1, 64, 256, "<f4")
    assert not joins(8, 2, 64, NARROW - 1, "<f4")
    monkeypatch.setattr(products, "joins", lambda *_: True)
    assert pairs(64, 256, "<f4")
    assert not pairs(256, PAIRED // 256 + 1, "<f4")
    pairs.cache_clear()
    monkeypatch.setattr(products, "joins", lambda k, *_: k != 4)
    assert not pairs(64, 256, "<f4")


@pytest.mark.skipif(openblas_kernel() != "SkylakeX", reason="what these kernels do was measured")
def test_kernels_for_avx512_join_common_shapes():
    for units in (16, 32, 64):
        assert pairs(units, 4 * units, "<f4")
        assert joins(8, 1, units, 4 * units, "<f4")
        assert joins(8, FEW_ROWS, units, 4 * units, "<f4")


@pytest.mark.usefixtures("compared_anew")
def test_rows_whose_bits_depend_on_their_number_arent_joined(monkeypatch):
    matmul = np.matmul

    def by_number(a, b):
        return matmul(a, b) * np.float32(1.0 + 1e-6 * (a.shape[-2] > 4))

    monkeypatch.setattr(np, "matmul", by_number)
    assert not joins(8, 2, 64, 256, "<f4")


@pytest.mark.usefixtures("compared_anew")
def test_few_rows_that_rarely_differ_arent_joined(monkeypatch):
    """One number in some hundred has other bits."""
    matmul, places = np.matmul, np.random.default_rng(0)

    def rarely(a, b):
        product = matmul(a, b)
        return product * np.where(places.random(product.shape) < 1 / 300, np.float32(1.0 + 1e-6), np.float32(1.0))

    monkeypatch.setattr(np, "matmul", rarely)
    assert not joins(2, 2, 64, NARROW, "<f4")


def test_float64_is_multiplied_as_such():
    weights, x = drawn(2, 64, 256, dtype=np.float64), drawn(2, 8, 1, 64, seed=1, dtype=np.float64)
    np.testing.assert_allclose(multiplied(x, weights), x @ weights[:, None], rtol=1e-12, atol=1e-12)
    assert_alone_as_together(x, weights)
