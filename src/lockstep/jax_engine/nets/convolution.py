"""Convolutions that are fast within loops too, with bits that don't depend on the number of threads.

XLA's CPU compiler reorders a convolution's axes for its fast kernels only in a program's outermost computation. Within
a loop (the rollout's scan, the map over shards) any other order takes a slow path. So on a CPU convolutions have that
order from the start, also in the gradient. Other devices' compilers recognise the gradients of convolutions by their
usual form, and get that.

Two libraries have such kernels. YNNPACK's bits are the same with any number of threads; Eigen cuts a long sum into as
many parts as there are threads if there are few results. So a convolution is put in a form that the compiler gives to
YNNPACK: no dilated images, padding no wider than the window makes up for, more than 16 channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

PRECISION = lax.Precision.HIGHEST
"""Precision of all products: by default a GPU would use TF32, a TPU bfloat16."""

_ORDER = ("NHWC", "HWIO", "NHWC")

NARROW = 16
"""Convolutions from and to at most this many channels go to Eigen."""

FEW_TERMS = 32
"""Eigen never cuts sums of at most this many terms."""


def convolve(x: Array, weight: Array, stride: int, padding: int) -> Array:
    """Convolves images ``[n, H, W, C]`` with ``[out, C, h, w]``: ``[n, H', W', out]``.

    Windows begin at every ``stride``-th pixel. The image is padded with ``padding`` rows and columns of zeros.
    """
    out: Any = _convolve(x, weight, stride, padding)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x: Array, weight: Array, stride: int, padding: int) -> Array:
    fast = partial(_forward, stride=stride, padding=padding)
    return lax.platform_dependent(x, weight, cpu=fast, default=partial(usual_convolution, stride, padding))


def usual_convolution(stride: int, padding: int, x: Array, weight: Array) -> Array:
    """Does what :func:`convolve` does with the framework's own convolution and gradient."""
    pads = [(padding, padding)] * 2
    order = ("NHWC", "OIHW", "NHWC")
    return lax.conv_general_dilated(x, weight, (stride, stride), pads, dimension_numbers=order, precision=PRECISION)


def _forward(x: Array, weight: Array, stride: int, padding: int) -> Array:
    return _fast(x, weight.transpose(2, 3, 1, 0), [(padding, padding)] * 2, stride=stride)


def _saved(x: Array, weight: Array, stride: int, padding: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve(x, weight, stride, padding), (x, weight)


def _backward(stride: int, padding: int, saved: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
    """Computes the gradients of ``x`` and ``weight`` from the output's ``[n, H', W', out]``."""

    def usual(x: Array, weight: Array, out: Array) -> tuple[Array, Array]:
        return jax.vjp(partial(usual_convolution, stride, padding), x, weight)[1](out)

    def fast(x: Array, weight: Array, out: Array) -> tuple[Array, Array]:
        return _image_gradient(x, weight, out, stride, padding), _weight_gradient(x, weight, out, stride, padding)

    return lax.platform_dependent(*saved, out, cpu=fast, default=usual)


def _image_gradient(x: Array, weight: Array, out: Array, stride: int, padding: int) -> Array:
    """Sums each pixel's gradient over the windows that contain it, by a convolution with the flipped kernel.

    The convolution has a stride of one. Each channel of its result is one of the ``stride x stride`` pixels of a
    square, which lie in the same windows. (A convolution of an output with zeros between its pixels would do the same.)
    """
    outs, channels = weight.shape[:2]
    taps = [-(-size // stride) for size in weight.shape[2:]]  # windows that contain a square, along an axis
    lacking = [(0, n * stride - size) for n, size in zip(taps, weight.shape[2:], strict=True)]
    weight = jnp.pad(weight, [(0, 0), (0, 0), *lacking])
    kernel = weight.reshape(outs, channels, taps[0], stride, taps[1], stride)
    kernel = jnp.flip(kernel, (2, 4)).transpose(2, 4, 0, 3, 5, 1).reshape(*taps, outs, -1)
    first = padding // stride  # square of the first pixel; those before it are padding
    squares = [(padding + size - 1) // stride - first + 1 for size in x.shape[1:3]]
    pads = [(n - 1 - first, count + first - seen) for n, count, seen in zip(taps, squares, out.shape[1:3], strict=True)]
    found = _fast(out, kernel, pads)
    pixels = found.reshape(len(x), *squares, stride, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    pixels = pixels.reshape(len(x), squares[0] * stride, squares[1] * stride, channels)
    edge = padding - first * stride
    return pixels[:, edge : edge + x.shape[1], edge : edge + x.shape[2]]


def _weight_gradient(x: Array, weight: Array, out: Array, stride: int, padding: int) -> Array:
    """Sums each weight's gradient over all windows, by a convolution over images with the output as the kernel."""
    rest = [(x.shape[1 + n] + 2 * padding - weight.shape[2 + n]) % stride for n in range(2)]  # no window reaches it
    pads = [(padding, padding - r) for r in rest]
    found = _fast(x.transpose(3, 1, 2, 0), out.transpose(1, 2, 0, 3), pads, dilation=stride)
    return found.transpose(3, 0, 1, 2)


def _fast(x: Array, kernel: Array, pads: Sequence[tuple[int, int]], stride: int = 1, dilation: int = 1) -> Array:
    """Convolves ``[n, H, W, C]`` with ``[h, w, C, out]`` in a form that XLA's CPU compiler gives to YNNPACK.

    Sums of at most :data:`FEW_TERMS` terms from and to few channels may go to Eigen. ``pads`` are the rows and columns
    of zeros before and after; negative ones cut as many off. A window reads every ``dilation``-th pixel.
    """
    sizes = [size + sum(pad) for size, pad in zip(x.shape[1:3], pads, strict=True)]
    spans = [(size - 1) * dilation + 1 for size in kernel.shape[:2]]
    found = [(size - span) // stride + 1 for size, span in zip(sizes, spans, strict=True)]
    larger = any(max(n, k) > size for n, k, size in zip(found, kernel.shape[:2], x.shape[1:3], strict=True))
    if larger or min(min(pad) for pad in pads) < 0:
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)])
        x, pads = lax.optimization_barrier(x), [(0, 0)] * 2
    outs = kernel.shape[-1]
    if max(kernel.shape[2:]) <= NARROW and math.prod(kernel.shape[:3]) > FEW_TERMS:
        kernel = jnp.pad(kernel, [(0, 0)] * 3 + [(0, NARROW + 1 - outs)])
    made = lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        pads,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=_ORDER,
        precision=PRECISION,
    )
    return made[..., :outs]


_convolve.defvjp(_saved, _backward)
