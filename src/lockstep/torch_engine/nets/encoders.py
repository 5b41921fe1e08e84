"""Encodes observation rows as features: numbers as they are, indices as one-hot vectors, images by convolutions."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.core.spaces import Leaf, ObservationLayout
from lockstep.networks.spec import IMPALA, NATURE, ImageEncoder, encoder_name
from lockstep.torch_engine.nets.layers_of_shards import ConvolutionOfShards, GradientPlaces, LinearOfShards
from lockstep.torch_engine.nets.memory import on_host

ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def float_columns(layout: ObservationLayout, rows: Tensor) -> Tensor:
    """Returns the float32 columns ``[…, float_size]`` of observation rows ``[…, width]``, as a view."""
    return rows[..., : 4 * layout.float_size].view(torch.float32) if layout.image_bytes else rows


def action_mask(layout: ObservationLayout, rows: Tensor) -> Tensor | None:
    """Returns which actions are allowed, bool ``[…, choices]``; None if all are."""
    leaf = layout.mask
    return None if leaf is None else float_columns(layout, rows)[..., leaf.start : leaf.start + leaf.size] > 0.5


def marked(indices: Tensor, choices: int) -> Tensor:
    """Marks the choice that each index ``[…]`` is, bool ``[…, choices]``; the host reads no index."""
    return torch.arange(choices, device=indices.device) == indices.unsqueeze(-1)


def _one_hot(indices: Tensor, choices: int) -> Tensor:
    """Encodes as PyTorch's function does, which on an accelerator would wait to check the indices."""
    return functional.one_hot(indices, choices) if on_host(indices.device) else marked(indices, choices)


def one_hot(leaf: Leaf, floats: Tensor) -> list[Tensor]:
    """Converts a Discrete or MultiDiscrete part to one-hot vectors ``[…, choices]``."""
    columns = floats[..., leaf.start : leaf.start + leaf.size].long()
    if leaf.pattern != leaf.choices:  # all repetitions at once, because a grid has dozens
        columns = columns.unflatten(-1, (-1, len(leaf.pattern)))
        parts = [_one_hot(columns[..., n], count) for n, count in enumerate(leaf.pattern)]
        return [torch.cat(parts, -1).flatten(-2).float()]
    return [_one_hot(columns[..., n], count).float() for n, count in enumerate(leaf.choices)]


def image(leaf: Leaf, rows: Tensor) -> Tensor:
    """Extracts an image ``[…, C, H, W]`` from rows, float32 between 0 and 1.

    On a CPU its channels lie last in memory, which makes convolutions faster.
    """
    shape = leaf.shape if len(leaf.shape) == 3 else (*leaf.shape, 1)
    pixels = rows[..., leaf.start : leaf.start + leaf.size].unflatten(-1, shape)
    if leaf.channels_first and len(leaf.shape) == 3:
        if not on_host(rows.device):
            return _scaled(pixels, 1.0 / leaf.high)
        pixels = pixels.movedim(-3, -1).contiguous()
    return _scaled(pixels, 1.0 / leaf.high).movedim(-1, -3)


def _scaled(pixels: Tensor, factor: float) -> Tensor:
    """Converts pixels to floats, multiplied; changes only floats of its own in place, as others may be the caller's."""
    return pixels * factor if pixels.dtype == torch.float32 else pixels.float().mul_(factor)


def images_of(layout: ObservationLayout, rows: Tensor) -> dict[str, Tensor]:
    """Extracts all images from rows, by the leaves' names; see :func:`image`."""
    return {leaf.name: image(leaf, rows) for leaf in layout.leaves if leaf.kind == "image"}


def _one(parameter: Tensor) -> Tensor:
    """Returns the first shard's parameter; a single shard's without an operation whose gradient autograd would copy."""
    return parameter.squeeze(0) if len(parameter) == 1 else parameter[0]


def _twice(x: Tensor) -> Tensor:
    """Copies a lone image ``[1, 1, C, H, W]`` into two that lie in memory as several images do."""
    one = x.flatten(0, 1)
    last = one.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return one.expand(2, *one.shape[1:]).contiguous(memory_format=layout).unsqueeze(0)


def convolve(x: Tensor, parameters: Mapping[str, Tensor], name: str, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolves images ``[k, n, C, H, W]``; those of several shards are one batch."""
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    if len(x) > 1 and weight.requires_grad:
        return ConvolutionOfShards.apply(x, weight, bias, stride, padding)  # pyright: ignore[reportReturnType]
    out = functional.conv2d(x.flatten(0, 1), _one(weight), _one(bias), stride, padding)
    return out.unflatten(0, x.shape[:2])


def _residual(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    inner = convolve(torch.relu(x), parameters, f"{name}.0", padding=1)
    return x + convolve(torch.relu(inner), parameters, f"{name}.1", padding=1)


def _convolutions(encoder: ImageEncoder, kind: str, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Applies an encoder's convolutions to images ``[k, n, C, H, W]``."""
    if kind == "nature":
        for layer, (_, _, stride) in enumerate(NATURE):
            x = torch.relu(convolve(x, parameters, f"{name}.{layer}", stride))
    elif kind == "simple":
        for layer in range(encoder.depth):
            x = torch.relu(convolve(x, parameters, f"{name}.{layer}", padding=1))
    elif kind == "residual":
        x = convolve(x, parameters, f"{name}.0", padding=1)
        for block in range(encoder.depth):
            x = _residual(x, parameters, f"{name}.0.{block}")
        x = torch.relu(x)
    else:
        for stage in range(len(IMPALA)):
            x = convolve(x, parameters, f"{name}.{stage}", padding=1)
            x = functional.max_pool2d(x.flatten(0, 1), 3, 2, 1).unflatten(0, x.shape[:2])
            for block in range(encoder.depth):
                x = _residual(x, parameters, f"{name}.{stage}.{block}")
        x = torch.relu(x)
    return x


def image_features(encoder: ImageEncoder, leaf: Leaf, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Computes features ``[k, n, features]`` of images ``[k, n, C, H, W]``.

    A lone image goes through the network twice, unless gradients are wanted. The kernels for a single row may be others
    than for several rows, whose numbers don't depend on how many they are (on the processors that were tried;
    :mod:`lockstep.torch_engine.setup.invariance` checks it).
    """
    k, n = x.shape[:2]
    if not torch.compiler.is_compiling() and k * n == 1 and not torch.is_grad_enabled():
        x = _twice(x)
    x = _convolutions(encoder, encoder.resolved(leaf), parameters, name, x)
    x = x.flatten(2)  # in the order [C, H, W] of the weight in a checkpoint
    weight, bias = parameters[f"{name}.out.weight"], parameters[f"{name}.out.bias"]
    if _by_onednn(x):
        into = parameters.take(f"{name}.out.weight") if isinstance(parameters, GradientPlaces) else None
        if weight.requires_grad and (k > 1 or into is not None):
            return torch.relu(LinearOfShards.apply(x, weight, bias, into))  # pyright: ignore[reportArgumentType]
        rows = functional.linear(x.flatten(0, 1).to_mkldnn(), _one(weight), _one(bias)).to_dense()
        return torch.relu(rows.unflatten(0, x.shape[:2])[:, :n])
    x = x[:, :n]
    if k == 1:  # its weight's gradient is laid out as stored; a batched product's is transposed
        return torch.relu(functional.linear(x.squeeze(0), _one(weight), _one(bias)).unsqueeze(0))
    return torch.relu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))


def _by_onednn(x: Tensor) -> bool:
    """Returns whether oneDNN, which computes convolutions on x86, should multiply rows ``[k, n, in]`` too.

    On some processors it uses wider vector instructions for that than the BLAS that PyTorch uses.
    """
    if torch.compiler.is_compiling() or not on_host(x.device) or x.shape[0] * x.shape[1] == 1:
        return False
    return ONEDNN and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def encode(
    layout: ObservationLayout,
    encoder: ImageEncoder,
    parameters: Mapping[str, Tensor],
    trunk: str,
    rows: Tensor,
    images: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Computes features ``[k, n, features]`` of observation rows ``[k, n, width]``.

    A caller that uses the rows' images more than once may pass them (:func:`images_of`).
    """
    if layout.plain:
        return rows
    images = images_of(layout, rows) if images is None else images
    floats = float_columns(layout, rows)
    parts = [floats[..., : layout.vector_size]] if layout.vector_size else []
    for leaf in layout.leaves:
        if leaf.kind == "one_hot":
            parts += one_hot(leaf, floats)
        elif leaf.kind == "image":
            parts.append(image_features(encoder, leaf, parameters, encoder_name(trunk, leaf), images[leaf.name]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
