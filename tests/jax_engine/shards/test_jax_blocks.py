"""Shards as blocks: nothing is lost or moved between shards when they are put together and taken apart."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from lockstep.jax_engine.minibatches import advantage_moments
from lockstep.jax_engine.shards.blocks import Blocks, each_shard, shards_together

SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([1, 2, 4])).filter(
    lambda sizes: sizes[2] <= sizes[0]
)


def numbered(*shape: int) -> jax.Array:
    """An array in which no number stands twice."""
    return jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)


@given(SIZES, st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_split_undoes_merge(sizes, axis):
    shards, rows, together = sizes
    blocks = Blocks(shards, rows, False, together)
    tree = {"vector": numbered(shards, *(3, rows)[2 - axis :], 2), "scalar": numbered(shards, *(3, rows)[2 - axis :])}
    merged = blocks.merge(tree, axis)
    assert merged["vector"].shape == (blocks.count, *(3, blocks.size)[2 - axis :], 2)
    back = blocks.split(merged, axis)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_a_block_has_its_shards_side_by_side():
    blocks = Blocks(4, 3, False, together=2)
    merged = blocks.merge(numbered(4, 4, 3), axis=2)
    assert merged.shape == (2, 4, 6)
    np.testing.assert_array_equal(merged[0, 1], [3, 4, 5, 15, 16, 17])
    np.testing.assert_array_equal(merged[1, 0], [24, 25, 26, 36, 37, 38])
    assert blocks.merge(numbered(4, 3)).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@given(SIZES, st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_indices_of_shards_choose_the_same_samples_of_a_block(sizes, length):
    shards, rows, together = sizes
    blocks, steps, minibatches = Blocks(shards, rows, False, together), 4, 2
    units = steps // length * rows
    values = numbered(shards, steps // length, rows)  # of each unit, as they lie: time-major
    random = np.random.default_rng(0)
    index = np.stack([random.permutation(units)[: units // 2 * 2].reshape(minibatches, -1) for _ in range(shards)])
    chosen = np.stack([np.asarray(values[s]).reshape(-1)[index[s]] for s in range(shards)])
    merged = np.asarray(blocks.merge(values, axis=2)).reshape(blocks.count, -1)
    whole = np.asarray(blocks.merge_indices(jnp.asarray(index)))
    taken = np.stack([merged[b][whole[b]] for b in range(blocks.count)])
    by_block = chosen.reshape(blocks.count, together, *chosen.shape[1:])
    expected = np.moveaxis(by_block, 1, 2).reshape(blocks.count, minibatches, -1)
    np.testing.assert_array_equal(taken, expected)


def test_without_moving_indices_other_samples_would_be_chosen():
    blocks, values = Blocks(2, 3, False, together=2), numbered(2, 4, 3)
    index = jnp.stack([jnp.arange(6)[None], jnp.arange(6)[None]])
    merged = blocks.merge(values, axis=2).reshape(-1)
    right, wrong = blocks.merge_indices(index)[0, 0], index.reshape(-1)
    assert merged[right].tolist() == [*range(6), *range(12, 18)]
    assert merged[wrong].tolist() != [*range(6), *range(12, 18)]


@pytest.mark.parametrize(
    ("together", "expected"),
    [(1, [[5.0], [7.0], [8.0], [9.0]]), (2, [[5.0] * 3 + [7.0] * 3, [8.0] * 3 + [9.0] * 3])],
)
def test_one_number_a_shard_reaches_all_of_its_units(together, expected):
    spread = Blocks(4, 2, False, together).spread(jnp.array([5.0, 7.0, 8.0, 9.0]), 3)
    assert spread.tolist() == expected


@pytest.mark.parametrize(
    ("shards", "rows", "on_cpu"), [(8, 1, 8), (8, 8, 8), (8, 16, 4), (6, 30, 3), (2, 64, 1), (1, 4, 1), (4, 500, 1)]
)
def test_on_a_cpu_shards_are_put_together_until_a_block_is_large_enough(shards, rows, on_cpu):
    assert shards_together(shards, rows, "cpu") == on_cpu
    assert shards_together(shards, rows, "gpu") == shards


@pytest.mark.parametrize("parts", [1, 2])
def test_sums_are_kept_by_block_or_not(parts):
    x = jnp.arange(4.0 * parts * 3).reshape(4 * parts, 3)

    def found(exact: bool, shards: int, together: int, x: jax.Array) -> list[list[float]]:
        blocks = Blocks(shards, 1, exact, together)
        return jax.jit(lambda x, owned: blocks.sum_parts(lambda row: row * 2, parts, owned, x))(x, shards).tolist()

    by_block = np.asarray(2 * x).reshape(4, parts, 3).sum(1)
    assert found(True, 4, 1, x) == by_block.tolist()
    assert found(False, 4, 1, x) == [by_block.sum(0).tolist()]
    assert found(False, 8, 2, x) == [by_block.sum(0).tolist()]
    assert found(False, 2, 2, x[:parts]) == by_block[:1].tolist()


def test_blocks_of_several_shards_are_called_as_often_as_there_are():
    blocks, x = Blocks(4, 2, False, together=2), jnp.arange(8.0).reshape(4, 2)
    called = jax.jit(lambda owned: blocks.each(lambda row: row - row.mean(), owned, blocks.merge(x)))
    expected = np.asarray(x).reshape(2, 4)
    np.testing.assert_array_equal(called(jnp.int32(4)), expected - expected.mean(1, keepdims=True))


def test_each_shard_is_called_by_itself_and_only_those_that_are_owned():
    x = jnp.arange(12.0).reshape(4, 3)
    called = jax.jit(lambda owned: each_shard(lambda row, n: (row * 2, row.sum() + n), 4, owned, x, jnp.arange(4)))
    doubled, sums = called(jnp.int32(4))
    np.testing.assert_array_equal(doubled, 2 * x)
    assert sums.tolist() == [3.0, 13.0, 23.0, 33.0]
    assert called(jnp.int32(2))[1].tolist() == [3.0, 13.0, 0.0, 0.0]


def test_moments_of_minibatches_are_those_of_numpy():
    random = np.random.default_rng(0)
    values, valid = random.normal(size=24).astype(np.float32), (random.random(24) > 0.3).astype(np.float32)
    index = random.permutation(24).reshape(2, 3, 4)
    for mask in (None, jnp.asarray(valid)):
        found = np.asarray(advantage_moments(jnp.asarray(values), mask, jnp.asarray(index)))
        for where in np.ndindex(2, 3):
            chosen = values[index[where]].astype(np.float64)
            chosen = chosen if mask is None else chosen[valid[index[where]] > 0]
            expected = [len(chosen), chosen.mean(), np.square(chosen - chosen.mean()).sum()]
            np.testing.assert_allclose(found[where], expected, rtol=1e-12, atol=1e-12)
