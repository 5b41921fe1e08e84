"""Multilayer perceptrons with a gradient by hand, in NumPy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x, out=x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0, out=x)


def _tanh_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    slope = np.multiply(h, h, out=h)  # the output isn't needed any more
    np.subtract(1.0, slope, out=slope)
    return np.multiply(d, slope, out=d)


def _relu_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    return np.multiply(d, h > 0.0, out=d)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))


def _elu_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    return np.multiply(d, np.where(h > 0.0, 1.0, h + 1.0), out=d)


ACTIVATIONS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "tanh": (_tanh, _tanh_back),
    "relu": (_relu, _relu_back),
    "elu": (_elu, _elu_back),
}
"""By name: the activation, and its derivative as a function of its output, which it may overwrite."""


CHEAP_COPY = 8192  # numbers of a weight; copying a larger one costs more than it saves
PACKED = 2048  # products with as many results or more make OpenBLAS pack a transposed factor (with AVX-512)
DOT = 32  # small products with sums as long or longer are added in another order
MANY_ROWS = 512  # of all shards; with fewer, copies of a bias take longer than they save
AT_ONCE = 512  # numbers of all copies of a bias
FEW_ROWS = 32  # of a shard; with fewer, a column is multiplied by a row as it is


def factor(transposed: np.ndarray, rows: int) -> np.ndarray:
    """Returns a transposed weight ``[…, in, out]`` for products with ``rows`` rows; as a copy if the bits are the same.

    OpenBLAS multiplies small matrices faster if neither is transposed, but not always in the same order. Where the
    order is the same was measured (docs/decisions/075-copies-of-transposed-weights.md).
    """
    inputs, outputs = transposed.shape[-2:]
    same = outputs % 64 == 0 and rows > 1 and (rows * outputs >= PACKED or inputs < DOT)
    return np.ascontiguousarray(transposed) if same and inputs * outputs <= CHEAP_COPY else transposed


def add_bias(x: np.ndarray, bias: np.ndarray) -> None:
    """Adds a bias ``[1, out]`` to every row of a contiguous ``x`` ``[k, rows, out]`` in place; for many rows.

    NumPy takes a broadcast bias row by row. Copies of it serve several rows at once.
    """
    width = bias.shape[1]
    together = max(1, AT_ONCE // width)
    if x.size % (together * width) == 0:
        x, bias = x.reshape(-1, together * width), bias.repeat(together, 0).ravel()
    x += bias


def outer(columns: np.ndarray, row: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Multiplies columns ``[…, rows, 1]`` by a row ``[…, 1, width]``: ``[…, rows, width]``.

    NumPy has no fast product over a single column. With many rows, a second column of zeros makes it one of BLAS, with
    the same bits but for the sign of zeros, which no sum shows.
    """
    if columns.shape[-2] < FEW_ROWS or row.ndim > 2:
        return np.multiply(columns, row, out=out)
    padded, two = np.zeros((*columns.shape[:-1], 2), columns.dtype), np.zeros((2, row.shape[1]), row.dtype)
    padded[..., :1], two[:1] = columns, row
    return np.matmul(padded, two, out=out)


Layer = tuple[np.ndarray, np.ndarray]
"""A weight ``[…, out, in]`` and a bias ``[…, 1, out]``, or their gradients."""


@functools.lru_cache
def _places(sizes: tuple[int, ...]) -> tuple[tuple[slice, slice, int, int], ...]:
    """Returns where weight and bias of each of consecutive layers lie, and the sizes of its result and its input."""
    places, start = [], 0
    for inputs, outputs in itertools.pairwise(sizes):
        middle = start + outputs * inputs
        places.append((slice(start, middle), slice(middle, middle + outputs), outputs, inputs))
        start = middle + outputs
    return tuple(places)


def width_of(sizes: tuple[int, ...]) -> int:
    """Returns the number of parameters of consecutive layers, given the sizes of their inputs and of the result."""
    return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))


def layers_in(memory: np.ndarray, sizes: tuple[int, ...]) -> list[Layer]:
    """Returns views of consecutive layers, which lie one after another in ``memory`` ``[…, width]``."""
    leading = memory.shape[:-1]
    return [
        (memory[..., weight].reshape(*leading, outputs, inputs), memory[..., None, bias])
        for weight, bias, outputs, inputs in _places(sizes)
    ]


class Mlp:
    """Applies layers, and computes gradients back through them.

    The layers' weights ``[out, in]`` may be changed from outside between calls. With weights ``[n, 1, out, in]`` and
    biases ``[n, 1, 1, out]``, ``n`` networks of the same sizes are computed at once, and arrays have ``n`` as a first
    axis; all may take one input ``[k, rows, in]``. The numbers are those of each network alone.

    Args:
        layers: weights and biases, in the order in which they are applied.
        activation: one of :data:`ACTIVATIONS`.
        linear: how many of the last layers have no activation.
    """

    def __init__(self, layers: Sequence[Layer], activation: str, linear: int = 0) -> None:
        self._layers = [(weight, weight.swapaxes(-1, -2), bias) for weight, bias in layers]
        self._activate, self._derive = ACTIVATIONS[activation]
        self._activated = len(layers) - linear
        self._ones: dict[int, np.ndarray] = {}

    def __call__(self, x: np.ndarray, kept: list[np.ndarray] | None = None) -> np.ndarray:
        """Maps ``[k, rows, in]`` to ``[k, rows, out]``; appends each layer's input and the result to ``kept``."""
        for layer, (_, transposed, bias) in enumerate(self._layers):
            if kept is not None:
                kept.append(x)
            x = np.matmul(x, factor(transposed, x.shape[-2]))
            if bias.ndim == 2 and bias.size > 1 and x.size >= MANY_ROWS * bias.size:
                add_bias(x, bias)
            else:
                x += bias
            if layer < self._activated:
                x = self._activate(x)
        if kept is not None:
            kept.append(x)
        return x

    def backward(
        self, kept: list[np.ndarray], d: np.ndarray, gradients: Sequence[Layer], into: np.ndarray | bool = False
    ) -> np.ndarray:
        """Writes the parameters' gradients into ``gradients``, of each shard's own; ``d`` is the result's gradient.

        ``d`` and what was ``kept`` are overwritten. ``into`` says whether the gradient of the input is computed too, or
        where to; returns it, or else that of the first layer.
        """
        rows = d.shape[-2]
        ones = self._ones.get(rows)
        if ones is None:
            ones = self._ones[rows] = np.ones((1, rows), d.dtype)
        for layer in range(len(self._layers) - 1, -1, -1):
            (weight, _, _), (d_weight, d_bias) = self._layers[layer], gradients[layer]
            if layer < self._activated:
                d = self._derive(d, kept[layer + 1])
            np.matmul(d.swapaxes(-1, -2), kept[layer], out=d_weight)
            np.matmul(ones, d, out=d_bias)
            if layer or into is not False:
                out = into if layer == 0 and isinstance(into, np.ndarray) else None
                d = outer(d, weight, out) if d.shape[-1] == 1 else np.matmul(d, weight, out=out)
        return d
