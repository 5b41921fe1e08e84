"""Multilayer perceptrons with a gradient by hand, in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet


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


def transposed(weight: np.ndarray, rows: int) -> np.ndarray:
    """Returns ``weight.T`` ``[in, out]`` for products with ``rows`` rows; as a copy if that gives the same bits.

    OpenBLAS multiplies small matrices faster if neither is transposed, but not always in the same order. Where the
    order is the same was measured (docs/decisions/075-copies-of-transposed-weights.md).
    """
    outputs, inputs = weight.shape
    same = outputs % 64 == 0 and rows > 1 and (rows * outputs >= PACKED or inputs < DOT)
    return np.ascontiguousarray(weight.T) if same and weight.size <= CHEAP_COPY else weight.T


class Mlp:
    """Applies the layers ``name`` of a network, and computes gradients back through them.

    The parameters are ``[out, in]`` and ``[out]`` by name, and may be changed from outside between calls.

    Attributes:
        width: the number of parameters.
    """

    def __init__(self, net: PolicyNet, parameters: Mapping[str, np.ndarray], name: str) -> None:
        self._layers = [
            (parameters[f"{name}.{layer}.weight"], parameters[f"{name}.{layer}.bias"])
            for layer in range(len(net.sizes(name)) - 1)
        ]
        self._activate, self._derive = ACTIVATIONS[net.activation]
        self._activated = len(self._layers) - (name != "trunk")
        *self._starts, self.width = itertools.accumulate((w.size + b.size for w, b in self._layers), initial=0)
        self._ones: dict[int, np.ndarray] = {}

    def __call__(self, x: np.ndarray, kept: list[np.ndarray] | None = None) -> np.ndarray:
        """Maps ``[k, rows, in]`` to ``[k, rows, out]``; appends each layer's input and the result to ``kept``."""
        for layer, (weight, bias) in enumerate(self._layers):
            if kept is not None:
                kept.append(x)
            x = np.matmul(x, transposed(weight, x.shape[1]))
            x += bias
            if layer < self._activated:
                x = self._activate(x)
        if kept is not None:
            kept.append(x)
        return x

    def backward(self, kept: list[np.ndarray], d: np.ndarray, out: np.ndarray, into: bool = False) -> np.ndarray:
        """Writes the parameters' gradients into ``out`` ``[k, width]``; ``d`` is the result's gradient.

        ``d`` and what was ``kept`` are overwritten. If ``into``, returns the gradient of the input ``[k, rows, in]``,
        else that of the first layer.
        """
        ones = self._ones.get(d.shape[1])
        if ones is None:
            ones = self._ones[d.shape[1]] = np.ones((1, d.shape[1]), d.dtype)
        for layer in range(len(self._layers) - 1, -1, -1):
            (weight, bias), x, at = self._layers[layer], kept[layer], self._starts[layer]
            if layer < self._activated:
                d = self._derive(d, kept[layer + 1])
            block = out[:, at : at + weight.size].reshape(len(out), *weight.shape)
            np.matmul(d.transpose(0, 2, 1), x, out=block)
            np.matmul(ones, d, out=out[:, None, at + weight.size : at + weight.size + bias.size])
            if layer or into:  # a product over a single column is faster as a multiplication
                d = d * weight[0] if len(weight) == 1 else np.matmul(d, weight)
        return d
