"""Shards as blocks: nothing is lost or moved between shards when they are put together and taken apart."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from lockstep.jax_engine.blocks import Blocks, each_shard
from lockstep.jax_engine.minibatches import advantage_moments

SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())


def numbered(*shape: int) -> jax.Array:
    """An array in which no number stands twice."""
    return jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)


@given(SIZES, st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_split_undoes_merge(sizes, axis):
    shards, rows, exact = sizes
    blocks = Blocks(shards, rows, exact)
    tree = {"vector": numbered(shards, *(3, rows)[2 - axis :], 2), "scalar": numbered(shards, *(3, rows)[2 - axis :])}
    merged = blocks.merge(tree, axis)
    assert merged["vector"].shape == (blocks.count, *(3, blocks.size)[2 - axis :], 2)
    back = blocks.split(merged, axis)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_a_block_has_its_shards_side_by_side():
    blocks = Blocks(2, 3, exact=False)
    merged = blocks.merge(numbered(2, 4, 3), axis=2)
    assert merged.shape == (1, 4, 6)
    np.testing.assert_array_equal(merged[0, 1], [3, 4, 5, 15, 16, 17])
    assert blocks.merge(numbered(2, 3)).tolist() == [[0, 1, 2, 3, 4, 5]]


@given(SIZES, st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_indices_of_shards_choose_the_same_samples_of_a_block(sizes, length):
    shards, rows, exact = sizes
    blocks, steps, minibatches = Blocks(shards, rows, exact), 4, 2
    units = steps // length * rows
    values = numbered(shards, steps // length, rows)  # of each unit, as they lie: time-major
    random = np.random.default_rng(0)
    index = np.stack([random.permutation(units)[: units // 2 * 2].reshape(minibatches, -1) for _ in range(shards)])
    chosen = np.stack([np.asarray(values[s]).reshape(-1)[index[s]] for s in range(shards)])
    merged = np.asarray(blocks.merge(values, axis=2)).reshape(blocks.count, -1)
    whole = np.asarray(blocks.merge_indices(jnp.asarray(index)))
    taken = np.stack([merged[b][whole[b]] for b in range(blocks.count)])
    expected = chosen if exact else np.moveaxis(chosen, 0, 1).reshape(1, minibatches, -1)
    np.testing.assert_array_equal(taken, expected)


def test_without_moving_indices_other_samples_would_be_chosen():
    blocks, values = Blocks(2, 3, exact=False), numbered(2, 4, 3)
    index = jnp.stack([jnp.arange(6)[None], jnp.arange(6)[None]])
    merged = blocks.merge(values, axis=2).reshape(-1)
    right, wrong = blocks.merge_indices(index)[0, 0], index.reshape(-1)
    assert merged[right].tolist() == [*range(6), *range(12, 18)]
    assert merged[wrong].tolist() != [*range(6), *range(12, 18)]


@pytest.mark.parametrize("exact", [True, False])
def test_one_number_a_shard_reaches_all_of_its_units(exact):
    blocks = Blocks(2, 3, exact)
    spread = blocks.spread(jnp.array([5.0, 7.0]), 4)
    assert spread.tolist() == ([[5.0], [7.0]] if exact else [[5.0] * 4 + [7.0] * 4])


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
