"""Shards meet on any number of devices that may own different numbers of them: the bytes of one fixed tree."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from variants import variants

from lockstep.core import tree as trees
from lockstep.core.tree import tree_of
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, reductions, shared_memory
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, Specs
from lockstep.jax_engine.distributed.reductions import gather_shards, sum_devices, sum_shards
from lockstep.jax_engine.shards.rows import ShardRows

pytestmark = pytest.mark.optimized

DEVICES = (1, 2, 3, 5, 6, 7, 8)
WAYS = pytest.mark.parametrize(
    "shared",
    [
        pytest.param(
            True, marks=pytest.mark.skipif(shared_memory.missing() is not None, reason="no C compiler"), id="in memory"
        ),
        pytest.param(False, id="by XLA"),
    ],
)
SLICES = pytest.mark.parametrize("sliced", [False, True], ids=["gathered", "by slices"])


@pytest.fixture
def slices(monkeypatch):
    """Says how sums of three devices and more travel, whatever their size."""
    return lambda sliced: monkeypatch.setattr(trees, "SLICED_BYTES", 0 if sliced else 1 << 60)


def spread(*shape, seed=0):
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * 10.0 ** random.uniform(-6, 6, shape)).astype(np.float32)


def summed(rows):
    while len(rows) > 1:
        paired = rows[0:-1:2] + rows[1::2]
        rows = np.concatenate([paired, rows[-1:]]) if len(rows) % 2 else paired
    return rows[0]


def in_rows(x, tree):
    """Shards as the rows of all devices; what is nobody's is NaN."""
    rows = ShardRows(tree)
    out = rows.laid_out(x).copy()
    if x.dtype == np.float32:
        out[np.setdiff1d(np.arange(rows.count), rows.of_shards)] = np.nan
    return out


def over(function, tree, shared, arguments, out_specs: Specs = REPLICATED, fsdp=1):
    """A function of a device's part of arrays by shard, over a mesh of as many devices as share the tree."""
    mesh = meshes.make_mesh(fsdp, len(tree.owned))
    mapped = meshes.over_mesh(function, mesh, SHARDED, out_specs, tree, shared=shared)
    return jax.tree.map(placement.fetch, jax.jit(mapped)(*(in_rows(x, tree) for x in arguments)))


def trees_of(shards):
    return [tree_of(shards, devices) for devices in DEVICES if devices <= shards]


@WAYS
@SLICES
@pytest.mark.parametrize("shards", variants([7, 8, 12, 24], [7, 24]))
def test_sums_have_the_bytes_of_the_tree_on_any_number_of_devices(slices, shards, sliced, shared):
    slices(sliced)
    x = spread(shards, 3, 67)
    for tree in trees_of(shards):
        found = over(lambda x: sum_shards({"a": x, "b": x[:, 0, :5]}), tree, shared, [x])
        assert found["a"].tobytes() == summed(x).tobytes(), len(tree.owned)
        assert found["b"].tobytes() == summed(x)[0, :5].tobytes(), len(tree.owned)


@WAYS
def test_large_sums_go_by_slices_and_have_the_same_bytes(shared):
    size = trees.SLICED_BYTES // 4 // 3 + 5
    x = spread(7, size)
    for devices in (2, 3, 5):
        tree = tree_of(7, devices)
        assert tree.sliced(4 * size) is (devices > 2)
        assert over(sum_shards, tree, shared, [x]).tobytes() == summed(x).tobytes()


@WAYS
@pytest.mark.parametrize("shards", [7, 8, 12])
def test_shards_are_gathered_in_their_order(shards, shared):
    x, numbers = spread(shards, 3), np.arange(shards, dtype=np.int32)
    for tree in trees_of(shards):
        assert over(gather_shards, tree, shared, [x]).tobytes() == x.tobytes()
        assert np.array_equal(over(gather_shards, tree, shared, [numbers]), numbers)


@WAYS
@SLICES
def test_one_and_no_element(slices, sliced, shared):
    slices(sliced)
    for x in (spread(8, 1), spread(8), *([] if sliced else [spread(8, 0)])):  # of nothing there are no slices
        for devices in (1, 3, 5):
            found = over(sum_shards, tree_of(8, devices), shared, [x])
            assert (found.shape, found.tobytes()) == (x.shape[1:], summed(x).tobytes())


@WAYS
@SLICES
def test_batches_of_sums_are_each_their_own(slices, sliced, shared):
    slices(sliced)
    x = spread(8, 4, 50)
    for devices in (1, 3, 5, 8):
        found = over(lambda x: jax.vmap(sum_shards, 1)(x), tree_of(8, devices), shared, [x])
        assert found.tobytes() == summed(x).tobytes()


@WAYS
def test_meshes_with_two_axes(shared):
    x = spread(8, 33)
    for fsdp, devices in ((2, 6), (3, 3), (7, 7)):
        assert over(sum_shards, tree_of(8, devices), shared, [x], fsdp=fsdp).tobytes() == summed(x).tobytes()


@WAYS
@SLICES
def test_sums_over_devices_are_of_the_tree_too(slices, sliced, shared):
    slices(sliced)
    x = spread(5, 4, 30)
    for devices in (3, 5):
        own = x[:devices]
        found = over(lambda rows: sum_devices(rows[0]), tree_of(devices, devices), shared, [own])
        assert found.tobytes() == summed(own).tobytes()


# --- products before the sum, which a compiler would like to add in one instruction


def of_products(devices, shared=False):
    x, y = spread(8, 40, 50, seed=1), spread(8, 40, 50, seed=2)

    def of_a_device(x, y):
        total = sum_shards(x * y)
        return total, total * total + total

    return over(of_a_device, tree_of(8, devices), shared, [x, y], (REPLICATED, REPLICATED)), x * y


@WAYS
@SLICES
def test_products_are_rounded_before_they_are_added(slices, sliced, shared):
    slices(sliced)
    (_, expected), products = of_products(1, shared)
    for devices in (1, 2, 3, 5, 8):
        (total, after), _ = of_products(devices, shared)
        assert total.tobytes() == summed(products).tobytes(), devices
        assert after.tobytes() == expected.tobytes(), devices


@SLICES
def test_without_a_detour_through_memory_they_are_not(slices, monkeypatch, sliced):
    """The negative of the above: XLA's compiler adds products that it hasn't rounded."""
    slices(sliced)
    monkeypatch.setattr(reductions, "materialized", lambda tree: tree)
    totals = {devices: of_products(devices)[0][0] for devices in (1, 3)}
    products = of_products(1)[1]
    assert any(total.tobytes() != summed(products).tobytes() for total in totals.values())
    magnitude = np.abs(products).sum(0)
    for total in totals.values():
        np.testing.assert_allclose(total / magnitude, summed(products) / magnitude, atol=1e-6)


@SLICES
def test_nodes_that_are_added_in_the_order_of_devices_have_other_bytes(slices, monkeypatch, sliced):
    slices(sliced)
    monkeypatch.setattr(reductions, "_finished", lambda parts, tree: sum(parts[1:], parts[0]))
    x = spread(8, 67)
    for devices in (3, 4, 5):
        assert over(sum_shards, tree_of(8, devices), False, [x]).tobytes() != summed(x).tobytes()


def test_a_row_of_nobodys_that_is_read_would_show(monkeypatch):
    monkeypatch.setattr(
        reductions, "_own_nodes", lambda rows, tree: jnp.stack([reductions.tree_sum(rows)] * tree.most_nodes)
    )
    x = spread(8, 67)
    assert np.isnan(over(sum_shards, tree_of(8, 3), False, [x])).all()


# --- where shards lie


def test_rows_by_hand():
    rows = ShardRows(tree_of(7, 3))
    assert (rows.count, rows.owned.tolist()) == (9, [3, 2, 2])
    assert rows.of_shards.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert rows.shard_of_row.tolist() == [0, 1, 2, 3, 4, 3, 5, 6, 5]
    assert rows.laid_out(np.arange(1, 8)).tolist() == [1, 2, 3, 4, 5, 0, 6, 7, 0]
    assert rows.laid_out(np.array([4, 5, 6, 7]), devices=(1, 2)).tolist() == [4, 5, 0, 6, 7, 0]
    assert rows.shards_alone(np.array([4, 5, 0, 6, 7, 0]), devices=(1, 2)).tolist() == [4, 5, 6, 7]


def test_shards_come_back_from_rows_along_any_axis():
    for shards in (5, 7, 8, 12):
        for devices in range(1, shards + 1):
            rows, x = ShardRows(tree_of(shards, devices)), spread(4, shards, 2)
            out = rows.laid_out(x, axis=1)
            assert out.shape == (4, rows.count, 2)
            assert np.array_equal(rows.shards_alone(out, axis=1), x)
            assert np.array_equal(rows.shard_of_row[rows.of_shards], np.arange(shards))
            owners = np.repeat(np.arange(devices), rows.owned)
            assert np.array_equal(owners[rows.shard_of_row], np.repeat(np.arange(devices), rows.tree.most_shards))
