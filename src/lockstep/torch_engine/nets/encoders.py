"""From observation rows to features: numbers as they are, indices as one-hot vectors, images through convolutions."""

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
    """Tells which actions are allowed, bool ``[…, choices]``; None if all."""
    leaf = layout.mask
    return None if leaf is None else float_columns(layout, rows)[..., leaf.start : leaf.start + leaf.size] > 0.5


def marked(indices: Tensor, choices: int) -> Tensor:
    """Marks which of so many choices each index ``[…]`` is, bool ``[…, choices]``; nothing looks at an index."""
    return torch.arange(choices, device=indices.device) == indices.unsqueeze(-1)


def _one_hot(indices: Tensor, choices: int) -> Tensor:
    """Does what PyTorch's function does, which waits for an accelerator to look for indices that are none."""
    return functional.one_hot(indices, choices) if on_host(indices.device) else marked(indices, choices)


def one_hot(leaf: Leaf, floats: Tensor) -> list[Tensor]:
    """Turns a Discrete or MultiDiscrete part into one-hot vectors ``[…, choices]``."""
    columns = floats[..., leaf.start : leaf.start + leaf.size].long()
    if leaf.pattern != leaf.choices:  # at once for all of its repetitions, of which a grid has dozens
        columns = columns.unflatten(-1, (-1, len(leaf.pattern)))
        parts = [_one_hot(columns[..., n], count) for n, count in enumerate(leaf.pattern)]
        return [torch.cat(parts, -1).flatten(-2).float()]
    return [_one_hot(columns[..., n], count).float() for n, count in enumerate(leaf.choices)]


def image(leaf: Leaf, rows: Tensor) -> Tensor:
    """Takes an image ``[…, C, H, W]`` out of rows, float32 between 0 and 1.

    On a CPU its channels lie last in memory, for which convolutions are faster.
    """
    shape = leaf.shape if len(leaf.shape) == 3 else (*leaf.shape, 1)
    pixels = rows[..., leaf.start : leaf.start + leaf.size].unflatten(-1, shape)
    if leaf.channels_first and len(leaf.shape) == 3:
        if not on_host(rows.device):
            return _scaled(pixels, 1.0 / leaf.high)
        pixels = pixels.movedim(-3, -1).contiguous()
    return _scaled(pixels, 1.0 / leaf.high).movedim(-1, -3)


def _scaled(pixels: Tensor, factor: float) -> Tensor:
    """Turns pixels into floats, multiplied: in the memory of floats that were bytes, for others may be a caller's."""
    return pixels * factor if pixels.dtype == torch.float32 else pixels.float().mul_(factor)


def images_of(layout: ObservationLayout, rows: Tensor) -> dict[str, Tensor]:
    """Takes all images out of rows, by the leaves' names; see :func:`image`."""
    return {leaf.name: image(leaf, rows) for leaf in layout.leaves if leaf.kind == "image"}


def _one(parameter: Tensor) -> Tensor:
    """Takes the first shard's parameter; of a single shard without an operation that autograd would copy it in."""
    return parameter.squeeze(0) if len(parameter) == 1 else parameter[0]


def _twice(x: Tensor) -> Tensor:
    """Copies an image alone, ``[1, 1, C, H, W]``, to two of it that lie in memory as several images do."""
    one = x.flatten(0, 1)
    last = one.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return one.expand(2, *one.shape[1:]).contiguous(memory_format=layout).unsqueeze(0)


def convolve(x: Tensor, parameters: Mapping[str, Tensor], name: str, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolves ``[k, n, C, H, W]``; with several shards their images are one batch."""
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    if len(x) > 1 and weight.requires_grad:
        return ConvolutionOfShards.apply(x, weight, bias, stride, padding)  # pyright: ignore[reportReturnType]
    out = functional.conv2d(x.flatten(0, 1), _one(weight), _one(bias), stride, padding)
    return out.unflatten(0, x.shape[:2])


def _residual(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    inner = convolve(torch.relu(x), parameters, f"{name}.0", padding=1)
    return x + convolve(torch.relu(inner), parameters, f"{name}.1", padding=1)


def _convolutions(encoder: ImageEncoder, kind: str, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Takes images ``[k, n, C, H, W]`` through an encoder's convolutions."""
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

    One image alone goes through the network twice, unless gradients are wanted: kernels for a single row may be others
    than for several, whose numbers don't depend on how many they are (on the processors that were tried;
    :mod:`lockstep.torch_engine.setup.choose_mode` looks).
    """
    k, n = x.shape[:2]
    if not torch.compiler.is_compiling() and k * n == 1 and not torch.is_grad_enabled():
        x = _twice(x)
    x = _convolutions(encoder, encoder.resolved(leaf), parameters, name, x)
    x = x.flatten(2)  # in the order [C, H, W], which is the weight's in a checkpoint
    weight, bias = parameters[f"{name}.out.weight"], parameters[f"{name}.out.bias"]
    if _by_onednn(x):
        into = parameters.take(f"{name}.out.weight") if isinstance(parameters, GradientPlaces) else None
        if weight.requires_grad and (k > 1 or into is not None):
            return torch.relu(LinearOfShards.apply(x, weight, bias, into))  # pyright: ignore[reportArgumentType]
        rows = functional.linear(x.flatten(0, 1).to_mkldnn(), _one(weight), _one(bias)).to_dense()
        return torch.relu(rows.unflatten(0, x.shape[:2])[:, :n])
    x = x[:, :n]
    if k == 1:  # the weight's gradient comes out as it is stored, of a batched product transposed
        return torch.relu(functional.linear(x.squeeze(0), _one(weight), _one(bias)).unsqueeze(0))
    return torch.relu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))


def _by_onednn(x: Tensor) -> bool:
    """Tells whether oneDNN, which computes convolutions on x86, shall multiply rows ``[k, n, in]`` too.

    On some processors it has wider vector instructions for that than the BLAS that PyTorch multiplies by.
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

    The rows' images (:func:`images_of`) may be given, by who has more than one use for them.
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
