"""Arrays of several types in one matrix of words, taken apart inside a program and on the host."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from lockstep.jax_engine.shards.packing import PackedLayout


@pytest.fixture(scope="module")
def arrays():
    floats = np.array([[1.5, np.nan, -0.0], [np.inf, 1e-45, -2.0]], np.float32)
    return {
        "floats": floats,
        "flags": np.array([True, False]),
        "numbers": np.array([-7, 2**31 - 1], np.int32),
        "small": np.array([[-1, 0], [1, -128]], np.int8),
        "scalars": floats[:, 0],
    }


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, x in expected.items():
        got = np.asarray(found[name])
        assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes()), name


def test_words_give_back_every_bit_in_a_program_and_on_the_host(arrays):
    layout = PackedLayout.of({name: jnp.asarray(x) for name, x in arrays.items()})
    words = np.asarray(jax.jit(layout.pack)(arrays))
    assert (words.dtype, words.shape) == (np.uint32, (2, 8))
    same(layout.on_host(words), arrays)
    same(jax.jit(layout.unpack)(words), arrays)


def test_words_of_part_of_the_rows_give_those(arrays):
    layout = PackedLayout.of(arrays)
    words = np.asarray(layout.pack({name: jnp.asarray(x) for name, x in arrays.items()}))
    same(layout.on_host(words[1:]), {name: x[1:] for name, x in arrays.items()})
