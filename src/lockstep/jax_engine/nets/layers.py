"""The layers of networks: Equinox modules on whole batches, with weights as checkpoints hold them.

Equinox's own layers take one example and are mapped over a batch, which puts the batch last in the products. These take
rows, so that a layer is one product, one sum and one activation in the compiled program.

A layer computes in the precision of its weights. Float32 weights give products in full float32: by default a GPU would
use TF32, a TPU bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
from jax import Array, lax

from lockstep.jax_engine.nets.activations import ACTIVATIONS
from lockstep.jax_engine.nets.convolution import PRECISION, convolve

HEAD = "head"
"""Names a head's operations in compiled programs, so that plans can tell their float32 products from bfloat16 ones."""


def product(x: Array, weight: Array) -> Array:
    """Multiplies ``[…, in]`` by ``[out, in]``: ``[…, out]``."""
    x = x.astype(weight.dtype)
    return _rows_product(x, weight) if x.ndim == 2 else _product(x, weight)


def _product(x: Array, weight: Array) -> Array:
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=PRECISION)


@jax.custom_vjp
def _rows_product(x: Array, weight: Array) -> Array:
    """Multiplies rows ``[n, in]``; its weight's gradient has a form for which XLA's CPU compiler has a fast product.

    That gradient sums over rows, the first axis of both factors. XLA's fast products sum over the last axis of one of
    them, so on a CPU the gradient is transposed in memory first.
    """
    return _product(x, weight)


def _rows_product_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_product(x, weight), (x, weight)


def _rows_product_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    return lax.platform_dependent(*kept, gradient, cpu=_rows_gradients, default=_usual_gradients)


def _usual_gradients(x: Array, weight: Array, gradient: Array) -> tuple[Array, Array]:
    return jax.vjp(_product, x, weight)[1](gradient)


def _rows_gradients(x: Array, weight: Array, gradient: Array) -> tuple[Array, Array]:
    into_x = lax.dot_general(gradient, weight, (((1,), (0,)), ((), ())), precision=PRECISION)
    columns = lax.optimization_barrier(gradient.T)
    into_weight = lax.dot_general(columns, x, (((1,), (0,)), ((), ())), precision=PRECISION)
    return into_x, into_weight


_rows_product.defvjp(_rows_product_forward, _rows_product_backward)


class Linear(eqx.Module):
    """A linear layer with weights ``[out, in]``: rows ``[…, in]`` to ``[…, out]``."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """Transforms rows ``[…, in]``."""
        return product(x, self.weight) + self.bias


class MLP(eqx.Module):
    """A multilayer perceptron with an activation after each layer, after the last one only if ``activate_last``."""

    layers: tuple[Linear, ...]
    activation: str = eqx.field(static=True)
    activate_last: bool = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """Transforms rows ``[…, in]`` to ``[…, out]``."""
        activate = ACTIVATIONS[self.activation]
        for number, layer in enumerate(self.layers):
            if self.activate_last or number < len(self.layers) - 1:
                x = activate(layer(x))
            else:
                with jax.named_scope(HEAD):
                    x = layer(x)
        return x


class Convolution(eqx.Module):
    """A convolution of images ``[n, H, W, C]`` with weights ``[out, in, h, w]``; see :func:`.convolution.convolve`.

    Channels are last because compilers on CPU and GPU convert any other order to that.
    """

    weight: Array
    bias: Array
    stride: int = eqx.field(static=True, default=1)
    padding: int = eqx.field(static=True, default=0)

    def __call__(self, x: Array) -> Array:
        """Transforms images ``[n, H, W, C]``."""
        return convolve(x.astype(self.weight.dtype), self.weight, self.stride, self.padding) + self.bias


Layer = TypeVar("Layer", Linear, Convolution)


def named(layer: Callable[..., Layer], name: str, *options: int) -> Layer:
    """Makes a layer that holds the names of its parameters in place of arrays, for a skeleton; see :mod:`.nets`."""
    return layer(f"{name}.weight", f"{name}.bias", *options)


def named_mlp(name: str, layers: int, activation: str, activate_last: bool) -> MLP:
    """Makes a multilayer perceptron of layers made by :func:`named`."""
    return MLP(tuple(named(Linear, f"{name}.{n}") for n in range(layers)), activation, activate_last)
