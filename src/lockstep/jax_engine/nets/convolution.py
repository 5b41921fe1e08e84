"""Convolutions that are fast within loops too.

XLA's CPU compiler brings a convolution's axes into the order that its fast kernel takes only in a program's outermost
computation. Within a loop (the rollout's scan, the map over shards) any other order takes a slow path.
So on a CPU they are in that order from the start, those of the gradient included. Other devices' compilers know the
gradients of convolutions by their usual form, and get that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

PRECISION = lax.Precision.HIGHEST
"""Of all products: on a GPU the default would be TF32."""

_FAST = ("NHWC", "HWIO", "NHWC")


def convolve(x: Array, weight: Array, stride: int, padding: int) -> Array:
    """Convolves images ``[n, H, W, C]`` with ``[out, C, h, w]``: ``[n, H', W', out]``.

    ``stride`` pixels lie between windows; ``padding`` rows and columns of zeros around the image.
    """
    out: Any = _convolve(x, weight, stride, padding)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x: Array, weight: Array, stride: int, padding: int) -> Array:
    fast = partial(_forward, stride=stride, padding=padding)
    return lax.platform_dependent(x, weight, cpu=fast, default=partial(usual_convolution, stride, padding))


def usual_convolution(stride: int, padding: int, x: Array, weight: Array) -> Array:
    """As :func:`convolve`, as the framework takes it and its gradient."""
    pads = [(padding, padding)] * 2
    order = ("NHWC", "OIHW", "NHWC")
    return lax.conv_general_dilated(x, weight, (stride, stride), pads, dimension_numbers=order, precision=PRECISION)


def _forward(x: Array, weight: Array, stride: int, padding: int) -> Array:
    kernel, pads = weight.transpose(2, 3, 1, 0), [(padding, padding)] * 2
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=_FAST, precision=PRECISION)


def _saved(x: Array, weight: Array, stride: int, padding: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve(x, weight, stride, padding), (x, weight)


def _backward(stride: int, padding: int, saved: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
    """Gradients of ``x`` and ``weight``, of the output's ``[n, H', W', out]``."""

    def usual(x: Array, weight: Array, out: Array) -> tuple[Array, Array]:
        return jax.vjp(partial(usual_convolution, stride, padding), x, weight)[1](out)

    def fast(x: Array, weight: Array, out: Array) -> tuple[Array, Array]:
        return _image_gradient(x, weight, out, stride, padding), _weight_gradient(x, weight, out, stride, padding)

    return lax.platform_dependent(*saved, out, cpu=fast, default=usual)


def _left_over(x: Array, weight: Array, stride: int, padding: int) -> list[int]:
    """Rows and columns at the end of the (padded) image that no window reaches."""
    return [(x.shape[1 + n] + 2 * padding - weight.shape[2 + n]) % stride for n in range(2)]


def _image_gradient(x: Array, weight: Array, out: Array, stride: int, padding: int) -> Array:
    """Gives each pixel its gradient from every window that it is in: a convolution with the kernel turned round."""
    kernel = jnp.flip(weight, (2, 3)).transpose(2, 3, 0, 1)
    before = [weight.shape[2 + n] - 1 - padding for n in range(2)]
    pads = [(b, b + rest) for b, rest in zip(before, _left_over(x, weight, stride, padding), strict=True)]
    return lax.conv_general_dilated(
        out, kernel, (1, 1), pads, lhs_dilation=(stride, stride), dimension_numbers=_FAST, precision=PRECISION
    )


def _weight_gradient(x: Array, weight: Array, out: Array, stride: int, padding: int) -> Array:
    """Gives each weight its gradient from every window: a convolution over images, with the output as kernel."""
    rest = _left_over(x, weight, stride, padding)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((padding, padding - r, 0) for r in rest), (0, 0, 0)])
    found = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        out.transpose(1, 2, 0, 3),
        (1, 1),
        [(0, 0), (0, 0)],
        rhs_dilation=(stride, stride),
        dimension_numbers=_FAST,
        precision=PRECISION,
    )
    return found.transpose(3, 0, 1, 2)


_convolve.defvjp(_saved, _backward)
