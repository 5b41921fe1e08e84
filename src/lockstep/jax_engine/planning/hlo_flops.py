"""Counts the operations of products in a compiled program: dots, convolutions, and a GPU's library calls."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class ConvolutionShapes(NamedTuple):
    """Shapes of a convolution's input, kernel and result."""

    lhs: Shape
    rhs: Shape
    out: Shape


def dot_flops(out: Shape, lhs: Shape, rest: str) -> float:
    """Counts two operations per element of the result and term of its sum; ``rest`` has the contracting axes."""
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    axes = [int(n) for n in found[1].split(",") if n] if found else []
    return 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in axes)


def convolution_flops(shapes: ConvolutionShapes, rest: str) -> float:
    """Counts two operations per element of the result, input channel, and place of the kernel that isn't on padding.

    A TPU's compiler writes matrix products as convolutions too.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    lhs_labels, rhs_labels, out_labels = labels.groups()
    batch_and_features = shapes.out[out_labels.index("b")] * shapes.out[out_labels.index("f")]
    channels = shapes.rhs[rhs_labels.index("i")]
    places = 1.0
    spatial = [letter for letter in out_labels if letter not in "bf"]
    for letter in sorted(spatial):
        window = _window(rest, int(letter))
        size = shapes.lhs[lhs_labels.index(letter)], shapes.out[out_labels.index(letter)]
        places *= _valid_places(*size, *window)
    groups = re.search(r"batch_group_count=(\d+)", rest)
    return 2.0 * batch_and_features * channels * places / (int(groups[1]) if groups else 1)


def _window(rest: str, axis: int) -> tuple[int, int, int, int, int]:
    """Parses a window's size, stride, padding before, and dilations of input and kernel, along one axis."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(part.split("=", 1) for part in found[1].split()) if found and found[1].strip() else {}

    def of(name: str, default: str) -> str:
        values = fields.get(name, "").split("x") if name in fields else []
        return values[axis] if axis < len(values) else default

    return (
        int(of("size", "1")),
        int(of("stride", "1")),
        int(of("pad", "0_0").split("_")[0]),
        int(of("lhs_dilate", "1")),
        int(of("rhs_dilate", "1")),
    )


def _valid_places(size: int, out: int, window: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> float:
    """Counts pairs of a result's place and a kernel's place that meet an element of the input, along one axis."""
    at = np.arange(out)[:, None] * stride - pad + np.arange(window)[None] * rhs_dilate
    return float(((at % lhs_dilate == 0) & (at >= 0) & (at // lhs_dilate < size)).sum())


def gemm_flops(shapes: ConvolutionShapes, rest: str) -> float:
    """Counts the operations of a call of cuBLAS, cuDNN or oneDNN; 0 for any other call."""
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    name = target[1] if target else ""
    if "gemm" in name or "matmul" in name:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', rest)
        contracting = [int(n) for n in re.findall(r"\d+", axes[1])] if axes else [len(shapes.lhs) - 1]
        return 2.0 * math.prod(shapes.out) * math.prod(shapes.lhs[axis] for axis in contracting)
    if "conv" not in name:
        return 0.0
    filter_, result = (shapes.out, shapes.rhs) if "BackwardFilter" in name else (shapes.rhs, shapes.out)
    result = shapes.lhs if "BackwardInput" in name else result
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    outputs = filter_[labels[2].index("o")] if labels else filter_[0]
    return 2.0 * math.prod(result) * math.prod(filter_) / max(1, outputs)
