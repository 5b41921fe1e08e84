"""Layers for images that compute parameters' gradients shard by shard, and all else for all images at once.

For each shard they return the bits that PyTorch's own layer gives the shard alone, if an image's numbers don't depend
on how many images there are; :mod:`lockstep.torch_engine.setup.invariance` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FEW_COLUMNS = 16
"""Columns of features with which oneDNN is called if only its gradient by a bias is wanted."""
LINE = 16
"""Elements in a line of a processor's cache: a matrix may begin at any of them."""
SMALL = 1 << 14
"""For weights with fewer elements oneDNN computes the gradient."""


class GradientPlaces(dict[str, Tensor]):
    """Parameters by name, with views of where their gradients belong; code that computes one may take its view."""

    def __init__(self, parameters: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._places = dict(places)

    def take(self, name: str) -> Tensor | None:
        """Returns the place of a parameter's gradient to the first caller, and None to later ones."""
        return self._places.pop(name, None)


class ConvolutionOfShards(torch.autograd.Function):
    """Convolves images ``[k, n, C, H, W]`` with parameters that repeat one shard's ``k`` times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        """Takes weights ``[k, out, C, h, w]`` and biases ``[k, out]``; returns ``[k, n, out, H', W']``."""
        ctx.save_for_backward(x, weight)
        ctx.options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
        return functional.conv2d(x.flatten(0, 1), weight[0], bias[0], stride, padding).unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the images' gradient from one call, and those of weights and biases from one call for each shard."""
        (x, weight), options = ctx.saved_tensors, ctx.options
        back, of_images = torch.ops.aten.convolution_backward, None
        if ctx.needs_input_grad[0]:
            joined = (grad.flatten(0, 1), x.flatten(0, 1), weight[0], None, *options)
            of_images = back(*joined, [True, False, False])[0].unflatten(0, x.shape[:2])
        sizes = list(weight.shape[1:2])
        parts = [
            back(g, images, weight[0], sizes, *options, [False, True, True]) for g, images in zip(grad, x, strict=True)
        ]
        return of_images, torch.stack([part[1] for part in parts]), torch.stack([part[2] for part in parts]), None, None


class LinearOfShards(torch.autograd.Function):
    """Multiplies features ``[k, n, in]`` with oneDNN by parameters that repeat one shard's ``k`` times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, into: Tensor | None) -> Tensor:
        """Takes weights ``[k, out, in]``, biases ``[k, out]`` and the place of the weights' gradients, or None."""
        ctx.save_for_backward(x, weight)
        ctx.into = into
        rows = functional.linear(x.flatten(0, 1).to_mkldnn(), weight[0], bias[0])
        return rows.to_dense().unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the features' gradient from one call, and those of weights and biases from calls for each shard."""
        (x, weight), into = ctx.saved_tensors, ctx.into
        joined = (x.flatten(0, 1).shape, grad.flatten(0, 1).to_mkldnn(), weight[0])
        of_features = torch.ops.aten.mkldnn_linear_backward_input(*joined).to_dense().view_as(x)
        of_weights = weight.new_empty(weight.shape) if into is None else into
        of_biases = [_of_parameters(*shard) for shard in zip(grad, x, weight, of_weights, strict=True)]
        return of_features, of_weights, torch.stack(of_biases), None


def _of_parameters(grad: Tensor, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Writes a shard's gradient by the weight ``[out, in]`` into ``out``, and returns that by the bias.

    oneDNN returns the former in its own memory, from which it would have to be copied, so the BLAS computes it if that
    gives the same bits. Then oneDNN computes the gradient by the bias with a few columns, because it doesn't depend on
    what is multiplied.
    """
    if products_alike(*x.shape, len(weight)):
        torch.mm(grad.t(), x, out=out)
        return _gradients_by_onednn(grad, x[:, :FEW_COLUMNS], weight[:, :FEW_COLUMNS])[1]
    product, of_bias = _gradients_by_onednn(grad, x, weight)
    out.copy_(product)
    return of_bias


def _gradients_by_onednn(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gradients = torch.ops.aten.mkldnn_linear_backward_weights(
        grad.contiguous().to_mkldnn(), x.contiguous().to_mkldnn(), weight.contiguous(), True
    )
    product, of_bias = (g.to_dense() if g.is_mkldnn else g for g in gradients)
    return product, of_bias


@lru_cache
@torch.no_grad()
def products_alike(rows: int, inputs: int, outputs: int) -> bool:
    """Returns whether BLAS and oneDNN compute the same gradients by weight, at any alignment, and by bias; tried once.

    It returns False for small weights: they may be equal by chance, and gain nothing.
    """
    if inputs * outputs < SMALL:
        return False
    generator = torch.Generator().manual_seed(rows)
    grad, x = (torch.randn(rows, width, generator=generator) for width in (outputs, inputs))
    product, of_bias = _gradients_by_onednn(grad, x, x.new_zeros(outputs, inputs))
    few = _gradients_by_onednn(grad, x[:, :FEW_COLUMNS], x.new_zeros(outputs, min(inputs, FEW_COLUMNS)))[1]
    if not torch.equal(few, of_bias):
        return False
    for offset in range(LINE):
        elsewhere = [_moved(part, offset) for part in (grad, x, product)]
        if not torch.equal(torch.mm(elsewhere[0].t(), elsewhere[1], out=elsewhere[2]), product):
            return False
    return True


def _moved(x: Tensor, offset: int) -> Tensor:
    """Copies a matrix to ``offset`` elements after the begin of a cache line."""
    return x.new_empty(offset + x.numel())[offset:].view_as(x).copy_(x)
