"""Max pooling that halves an image, fast on a CPU, where XLA's own looks at one number after another."""

from __future__ import annotations

from functools import reduce

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

WINDOW, EDGE = 3, 1


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """Takes the maximum of 3 x 3 pixels with stride two, over images ``[n, H, W, C]`` padded by one pixel."""
    return lax.platform_dependent(x, cpu=_largest, default=usual_pool)


def usual_pool(x: Array) -> Array:
    """Does what :func:`max_pool` does with the framework's own pool and gradient."""
    lowest = np.array(-np.inf, x.dtype)  # JAX knows a pool with a gradient by this constant
    edges = ((0, 0), (EDGE, EDGE), (EDGE, EDGE), (0, 0))
    return lax.reduce_window(x, lowest, lax.max, (1, WINDOW, WINDOW, 1), (1, 2, 2, 1), edges)


def _saved(x: Array) -> tuple[Array, Array]:
    return max_pool(x), x


def _backward(x: Array, gradient: Array) -> tuple[Array]:
    return (lax.platform_dependent(x, gradient, cpu=_by_places, default=_usual),)


def _usual(x: Array, gradient: Array) -> Array:
    return jax.vjp(usual_pool, x)[1](gradient)[0]


def _by_places(x: Array, gradient: Array) -> Array:
    """Adds each window's gradient to its largest pixel, to the first of several, as the framework does.

    A pixel sums over the windows that contain it, in their order: one, two or four, depending on whether its row and
    its column are even.
    """
    place = lax.optimization_barrier(_place_of_largest(x))
    edges = ((0, 0), (0, 1), (0, 1), (0, 0))  # windows after the last ones; they have no pixel
    gradient, place = jnp.pad(gradient, edges), jnp.pad(place, edges, constant_values=-1)
    rows, columns = (size - 1 for size in gradient.shape[1:3])

    def given(down: int, right: int, place_in_window: int) -> Array:
        window = slice(None), slice(down, down + rows), slice(right, right + columns)
        return jnp.where(place[window] == place_in_window, gradient[window], 0.0)

    # Where pixels lie in the windows that contain them: even ones in the middle of one, odd ones at the ends of two.
    seen = (((0, 1),), ((0, 2), (1, 0)))

    def pixels(odd_row: int, odd_column: int) -> Array:
        parts = (
            given(down, right, WINDOW * row + column)
            for down, row in seen[odd_row]
            for right, column in seen[odd_column]
        )
        return reduce(jnp.add, parts)

    squares = jnp.stack([jnp.stack([pixels(row, column) for column in (0, 1)], 3) for row in (0, 1)], 2)
    return squares.reshape(len(x), 2 * rows, 2 * columns, -1)[:, : x.shape[1], : x.shape[2]]


def _largest(x: Array) -> Array:
    return reduce(jnp.maximum, _places(x))


def _place_of_largest(x: Array) -> Array:
    """Returns the place of each window's largest pixel, counted row by row, int8 ``[n, rows, columns, C]``."""
    largest, *others = _places(x)
    place = jnp.zeros(largest.shape, jnp.int8)
    for number, pixel in enumerate(others, 1):
        larger = pixel > largest
        largest, place = jnp.where(larger, pixel, largest), jnp.where(larger, jnp.int8(number), place)
    return place


def _places(x: Array) -> list[Array]:
    """Returns the pixels in each place of all windows ``[n, rows, columns, C]``, row by row; -inf in the padding."""
    rows, columns = (-(-size // 2) for size in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (EDGE, EDGE), (EDGE, EDGE), (0, 0)), constant_values=-jnp.inf)
    return [
        x[:, row : row + 2 * rows - 1 : 2, column : column + 2 * columns - 1 : 2]
        for row in range(WINDOW)
        for column in range(WINDOW)
    ]


max_pool.defvjp(_saved, _backward)
