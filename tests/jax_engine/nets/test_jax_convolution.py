"""The convolution's own gradient is the usual one's; on a CPU its form is fast, and no pool decides its bits."""

import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from lockstep.jax_engine.nets.convolution import convolve, usual_convolution

FAST = "b01f_01io->b01f"


def drawn(height: int, width: int, kernel: tuple[int, int]) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, height, width, 2)), rng.normal(size=(4, 2, *kernel))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


def squares(function: Any, x: Any, weight: Any) -> Any:
    return jnp.square(function(x, weight)).sum()


@pytest.mark.parametrize(
    ("height", "width", "kernel", "stride", "padding"),
    [
        (12, 12, (4, 4), 2, 0),
        (13, 15, (4, 4), 3, 0),  # the last row and columns are in no window
        (7, 8, (3, 3), 1, 1),
        (7, 8, (3, 3), 2, 1),
        (9, 6, (3, 2), 4, 1),
        (5, 5, (5, 5), 1, 0),
        (6, 6, (1, 1), 3, 0),
    ],
)
def test_it_and_its_gradients_are_theusual_convolution_ones(height, width, kernel, stride, padding):
    x, weight = drawn(height, width, kernel)
    ours, usual = partial(convolve, stride=stride, padding=padding), partial(usual_convolution, stride, padding)
    np.testing.assert_allclose(ours(x, weight), usual(x, weight), rtol=1e-5, atol=1e-5)
    found, expected = (jax.jit(jax.grad(partial(squares, f), (0, 1)))(x, weight) for f in (ours, usual))
    for gradient, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-4)
        assert np.abs(right).max() > 1.0


def forms_in_a_loop(function: Any) -> set[str]:
    """The orders of axes of the convolutions in a compiled map over shards of values and gradients."""
    x, weight = drawn(12, 12, (4, 4))
    run = jax.jit(lambda xs, w: jax.lax.map(lambda x: jax.grad(partial(squares, function), (0, 1))(x, w), xs))
    return set(re.findall(r"dim_labels=(\S+?),", str(run.lower(x[:, None], weight).compile().as_text())))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU compiler")
def test_in_a_loop_every_convolution_has_the_fast_form():
    assert forms_in_a_loop(partial(convolve, stride=2, padding=0)) == {FAST}
    assert forms_in_a_loop(partial(usual_convolution, 2, 0)) - {FAST}, "the compiler brings them into it by itself now"


def test_in_bfloat16_its_gradients_are_too():
    x, weight = (a.astype(jnp.bfloat16) for a in drawn(8, 8, (3, 3)))
    gradients = jax.eval_shape(jax.grad(partial(squares, partial(convolve, stride=1, padding=1)), (0, 1)), x, weight)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2


def left_to_eigen(function: Any, images: int, height: int, channels: tuple[int, int], kernel: int) -> list[str]:
    """Convolutions of a compiled loop over values and gradients that aren't YNNPACK's, see ``test_jax_set_up.py``."""
    x, weight = jnp.ones((2, images, height, height + 1, channels[0])), jnp.ones((*channels[::-1], kernel, kernel))
    run = jax.jit(lambda xs, w: jax.lax.map(lambda x: jax.grad(partial(squares, function), (0, 1))(x, w), xs))
    text = str(run.lower(x, weight).compile().as_text())
    ynnpacks = set(re.findall(r"calls=(%[^,]+),.*__ynn_fusion", text))
    computations = [part.strip() for part in text.split("\n\n") if " convolution(" in part]
    assert sum(part.count(" convolution(") for part in computations) == 3  # itself and two gradients
    others = [part for part in computations if part.split()[0] not in ynnpacks]
    return [line.strip() for part in others for line in part.splitlines() if " convolution(" in line]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU compiler")
@pytest.mark.parametrize(
    ("images", "height", "channels", "kernel", "stride", "padding"),
    [
        (32, 20, (32, 64), 4, 2, 0),  # of Nature's
        (2, 9, (64, 64), 3, 1, 0),
        (7, 8, (16, 16), 3, 1, 1),  # of IMPALA's: narrow
        (1, 2, (16, 32), 3, 1, 1),  # a window larger than the image
        (3, 13, (5, 7), 4, 3, 2),
    ],
)
def test_no_convolution_is_left_to_eigen(images, height, channels, kernel, stride, padding):
    shape = images, height, channels, kernel
    assert left_to_eigen(partial(convolve, stride=stride, padding=padding), *shape) == []
    assert left_to_eigen(partial(usual_convolution, stride, padding), *shape) != []


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU compiler")
def test_but_for_those_of_few_terms():
    (first,) = left_to_eigen(partial(convolve, stride=1, padding=1), 2, 8, (3, 16), 3)
    assert "jvp()" in first
    assert "transpose(jvp())" not in first
