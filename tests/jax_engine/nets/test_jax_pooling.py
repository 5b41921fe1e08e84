"""The pool's own gradient is the framework's: of windows with one largest pixel, with several, at edges."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from lockstep.jax_engine.nets.pooling import max_pool, usual_pool


def gradient(pool, x, weights):
    return jax.jit(jax.grad(lambda x: (pool(x) * weights).sum()))(x)


@pytest.mark.parametrize("size", [(8, 8), (9, 12), (1, 1), (2, 5), (7, 3)])
@pytest.mark.parametrize("values", ["different", "few"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_and_its_gradient_are_the_usual_ones(size, values, dtype):
    rng, shape = np.random.default_rng(0), (2, *size, 3)
    drawn = rng.normal(size=shape) if values == "different" else rng.integers(0, 3, shape)
    x = jnp.asarray(drawn, dtype)
    pooled = usual_pool(x)
    np.testing.assert_array_equal(max_pool(x), pooled)
    weights = jnp.asarray(rng.normal(size=pooled.shape), dtype)
    found, expected = gradient(max_pool, x, weights), gradient(usual_pool, x, weights)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert (np.asarray(expected, np.float32) != 0.0).sum() >= min(size)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU compiler")
def test_it_does_without_the_compilers_own():
    x = jnp.ones((2, 8, 8, 3))

    def text(pool):
        return jax.jit(jax.grad(lambda x: jnp.square(pool(x)).sum())).lower(x).as_text()

    assert "select_and_scatter" in text(usual_pool)
    assert "select_and_scatter" not in text(max_pool)
