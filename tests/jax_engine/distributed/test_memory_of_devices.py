"""Collectives between CPU devices in the memory of their process: what they give."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, shared_memory
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED
from lockstep.jax_engine.distributed.reductions import (
    AXES,
    device_index,
    gather_shards,
    sum_devices,
    sum_shards,
    tree_sum,
)

pytestmark = pytest.mark.skipif(shared_memory.missing() is not None, reason="no C compiler")

NUMBERS = (1, 2, 4, 8)


def over(function, devices, in_specs=SHARDED, out_specs=REPLICATED, shared=True):
    return jax.jit(meshes.over_mesh(function, meshes.make_mesh(1, devices), in_specs, out_specs, shared=shared))


def rows(*shape, seed=0):
    random = np.random.default_rng(seed)
    spread = random.choice([1e-6, 1.0, 1e6], shape)  # so that the order of a sum shows in its bits
    return (random.normal(size=shape) * spread).astype(np.float32)


def fetched(tree):
    return jax.tree.map(placement.fetch, tree)


@pytest.mark.parametrize("width", [1, 7, 511, 512, 513, 5000])
@pytest.mark.parametrize("shards", [8, 32])
def test_sums_are_those_of_the_tree_on_every_number_of_devices(width, shards):
    x = rows(shards, width)
    expected = x
    while len(expected) > 1:
        expected = expected[0::2] + expected[1::2]
    for devices in NUMBERS:
        assert fetched(over(sum_shards, devices)(x)).tobytes() == expected[0].tobytes(), devices
    in_order = np.add.accumulate(x)[-1]
    assert width == 1 or in_order.tobytes() != expected.tobytes()


def test_sums_are_those_of_xla():
    x = rows(8, 3, 40)
    for devices in NUMBERS:
        ours, xlas = (over(sum_shards, devices, shared=shared)(x) for shared in (True, False))
        assert fetched(ours).tobytes() == fetched(xlas).tobytes()
        ours, xlas = (over(lambda x: sum_devices(tree_sum(x)), devices, shared=shared)(x) for shared in (True, False))
        assert fetched(ours).tobytes() == fetched(xlas).tobytes()
    plain = over(lambda x: jax.lax.psum(tree_sum(x), AXES), 8)(x)
    assert fetched(plain).tobytes() != fetched(ours).tobytes()


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.float32, "bfloat16"])
def test_rows_of_every_type_come_in_the_order_of_devices(dtype):
    x = np.arange(8 * 2 * 5).reshape(16, 5).astype(jnp.dtype(dtype))
    for devices in NUMBERS:
        found = fetched(over(gather_shards, devices)({"x": x, "part": x[:, 2:]}))
        assert np.array_equal(found["x"], x)
        assert np.array_equal(found["part"], x[:, 2:])


def test_rows_of_eight_bytes_too():
    with jax.enable_x64(True):
        x = np.arange(48, dtype=np.float64).reshape(16, 3) / 7
        found = fetched(over(gather_shards, 4)({"f": x, "i": np.arange(16) << 40}))
    assert np.array_equal(found["f"], x)
    assert np.array_equal(found["i"], np.arange(16) << 40)


def test_batches_are_summed_and_gathered_each_by_itself():
    x = rows(8, 5, 30)

    def of_a_device(x):
        turned = jnp.moveaxis(x, 1, 0)
        return jax.vmap(sum_shards)(turned), jax.vmap(gather_shards)(turned), jax.vmap(sum_devices)(turned[:, 0])

    for devices in NUMBERS:
        sums, gathered, totals = fetched(over(of_a_device, devices)(x))
        for k in range(5):
            assert sums[k].tobytes() == fetched(over(sum_shards, devices)(x[:, k])).tobytes()
            assert np.array_equal(gathered[k], x[:, k])
            assert totals[k].tobytes() == fetched(over(lambda x: sum_devices(x[0]), devices)(x[:, k])).tobytes()


def test_thousands_of_meetings_in_loops_of_programs_that_take_turns():
    """Sizes change from one to the next; eight devices on fewer cores."""

    def of_a_device(x):
        def body(i, x):
            return x + sum_shards(x)[None] + gather_shards(x[:, :3]).sum() * 0 + i * device_index()

        return jax.lax.fori_loop(0, 500, body, x % 1024)

    whole = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    programs = {(n, shared): over(of_a_device, n, SHARDED, SHARDED, shared) for n in (2, 8) for shared in (True, False)}
    results = {key: [] for key in programs}
    for turn in range(4):
        for key, program in programs.items():
            results[key].append(program(whole + turn))
    for n in (2, 8):
        for ours, xlas in zip(results[n, True], results[n, False], strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(xlas).tobytes()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at memory through /proc")
def test_memory_does_not_grow_with_the_number_of_calls():
    program, x = over(lambda x: sum_shards(x)[:4], 8), np.ones((8, 1 << 20), np.float32)
    taken = []
    for _ in range(40):
        jax.block_until_ready(program(x))
        taken.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
    assert taken[-1] - taken[3] < 300 << 20  # a place of its own for every call would be more than a gigabyte
