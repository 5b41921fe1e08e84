"""From observation rows to features: numbers as they are, indices as one-hot vectors, images through convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.spaces import Leaf, ObservationLayout

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each layer (Mnih et al. 2015)."""
NATURE_SMALLEST = 36
IMPALA = (16, 32, 32)
"""Channels of each stage (Espeholt et al. 2018, figure 3, right)."""
FEATURES = {"nature": 512, "impala": 256, "simple": 256}
SIMPLE_CHANNELS = 32

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ImageEncoder:
    """Convolutions for images.

    Attributes:
        kind: ``nature`` (from 36 x 36 pixels on), ``impala`` (residual), ``simple`` (3 x 3 at full resolution, for
            small grids), or ``auto``: nature where it fits, else simple.
        width: channels and features are multiplied by it.
        depth: residual blocks per stage (impala) or layers (simple).
    """

    kind: Literal["auto", "nature", "impala", "simple"] = "auto"
    width: float = 1.0
    depth: int = 2

    def resolved(self, leaf: Leaf) -> str:
        """The kind for one image."""
        if self.kind != "auto":
            return self.kind
        return "nature" if min(leaf.image_shape[1:]) >= NATURE_SMALLEST else "simple"

    def check(self, layout: ObservationLayout) -> None:
        """Raise a one-line ``ValueError`` if an image is too small for its encoder."""
        for leaf in layout.leaves:
            if leaf.kind == "image" and self.resolved(leaf) == "nature" and min(leaf.image_shape[1:]) < NATURE_SMALLEST:
                raise ValueError(
                    f"network.image.kind: nature needs images of {NATURE_SMALLEST} x {NATURE_SMALLEST} pixels or more "
                    f"and {leaf.name or 'the observation'} has {leaf.image_shape[1]} x {leaf.image_shape[2]}; use "
                    "simple or impala"
                )

    def scaled(self, channels: int) -> int:
        """A number of channels or features at this width."""
        return max(1, round(channels * self.width))

    def convolutions(self, leaf: Leaf) -> tuple[Shapes, int]:
        """Shapes of one image's convolutions by name, and how many numbers come out of them."""
        channels, height, width = leaf.image_shape
        kind, out = self.resolved(leaf), {}
        if kind == "nature":
            for layer, (wanted, kernel, stride) in enumerate(NATURE):
                out[f"{layer}"] = (self.scaled(wanted), channels, kernel, kernel)
                channels = self.scaled(wanted)
                height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        elif kind == "simple":
            for layer in range(self.depth):
                out[f"{layer}"] = (self.scaled(SIMPLE_CHANNELS), channels, 3, 3)
                channels = self.scaled(SIMPLE_CHANNELS)
        else:
            for stage, wanted in enumerate(IMPALA):
                out[f"{stage}"] = (self.scaled(wanted), channels, 3, 3)
                channels = self.scaled(wanted)
                height, width = -(-height // 2), -(-width // 2)
                for block in range(self.depth):
                    out[f"{stage}.{block}.0"] = out[f"{stage}.{block}.1"] = (channels, channels, 3, 3)
        return out, channels * height * width

    def shapes(self, layout: ObservationLayout, trunk: str) -> Shapes:
        """Parameters of the encoders of a network."""
        out: Shapes = {}
        for leaf in layout.leaves:
            if leaf.kind != "image":
                continue
            name, (convolutions, flat) = encoder_name(trunk, leaf), self.convolutions(leaf)
            for layer, shape in convolutions.items():
                out[f"{name}.{layer}.weight"], out[f"{name}.{layer}.bias"] = shape, (shape[0],)
            features = self.scaled(FEATURES[self.resolved(leaf)])
            out[f"{name}.out.weight"], out[f"{name}.out.bias"] = (features, flat), (features,)
        return out

    def feature_size(self, layout: ObservationLayout) -> int:
        """Features of an observation."""
        images = (self.scaled(FEATURES[self.resolved(x)]) for x in layout.leaves if x.kind == "image")
        return layout.vector_size + sum(sum(leaf.choices) for leaf in layout.leaves) + sum(images)


def encoder_name(trunk: str, leaf: Leaf) -> str:
    """The prefix of an image encoder's parameters."""
    return f"{trunk}.encoder.{leaf.name.replace('/', '.') or 'image'}"


def float_columns(layout: ObservationLayout, rows: Tensor) -> Tensor:
    """The float32 columns ``[…, float_size]`` of observation rows ``[…, width]``, as a view."""
    return rows[..., : 4 * layout.float_size].view(torch.float32) if layout.image_bytes else rows


def action_mask(layout: ObservationLayout, rows: Tensor) -> Tensor | None:
    """Which actions are allowed, bool ``[…, choices]``; None if all."""
    leaf = layout.mask
    return None if leaf is None else float_columns(layout, rows)[..., leaf.start : leaf.start + leaf.size] > 0.5


def one_hot(leaf: Leaf, floats: Tensor) -> list[Tensor]:
    """A Discrete or MultiDiscrete part as one-hot vectors ``[…, choices]``."""
    columns = floats[..., leaf.start : leaf.start + leaf.size].long()
    return [functional.one_hot(columns[..., n], count).float() for n, count in enumerate(leaf.choices)]


def image(leaf: Leaf, rows: Tensor) -> Tensor:
    """An image ``[…, C, H, W]`` of rows, float32 between 0 and 1."""
    shape = leaf.shape if len(leaf.shape) == 3 else (*leaf.shape, 1)
    pixels = rows[..., leaf.start : leaf.start + leaf.size].unflatten(-1, shape)
    if not (leaf.channels_first and len(leaf.shape) == 3):
        pixels = pixels.movedim(-1, -3)
    return pixels.float() * (1.0 / leaf.high)


def convolve(x: Tensor, parameters: Mapping[str, Tensor], name: str, stride: int = 1, padding: int = 0) -> Tensor:
    """A convolution of ``[k, n, C, H, W]``; with several shards their images are one batch (no gradient by shard)."""
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    assert len(x) == 1 or not weight.requires_grad, "gradients of convolutions are taken shard by shard"
    out = functional.conv2d(x.flatten(0, 1), weight[0], bias[0], stride, padding)
    return out.unflatten(0, x.shape[:2])


def _residual(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    inner = convolve(torch.relu(x), parameters, f"{name}.0", padding=1)
    return x + convolve(torch.relu(inner), parameters, f"{name}.1", padding=1)


def image_features(encoder: ImageEncoder, leaf: Leaf, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Features ``[k, n, features]`` of images ``[k, n, C, H, W]``."""
    kind = encoder.resolved(leaf)
    if kind == "nature":
        for layer, (_, _, stride) in enumerate(NATURE):
            x = torch.relu(convolve(x, parameters, f"{name}.{layer}", stride))
    elif kind == "simple":
        for layer in range(encoder.depth):
            x = torch.relu(convolve(x, parameters, f"{name}.{layer}", padding=1))
    else:
        for stage in range(len(IMPALA)):
            x = convolve(x, parameters, f"{name}.{stage}", padding=1)
            x = functional.max_pool2d(x.flatten(0, 1), 3, 2, 1).unflatten(0, x.shape[:2])
            for block in range(encoder.depth):
                x = _residual(x, parameters, f"{name}.{stage}.{block}")
        x = torch.relu(x)
    weight, bias = parameters[f"{name}.out.weight"], parameters[f"{name}.out.bias"]
    return torch.relu(torch.baddbmm(bias.unsqueeze(1), x.flatten(2), weight.transpose(1, 2)))


def encode(
    layout: ObservationLayout, encoder: ImageEncoder, parameters: Mapping[str, Tensor], trunk: str, rows: Tensor
) -> Tensor:
    """Features ``[k, n, features]`` of observation rows ``[k, n, width]``."""
    if layout.plain:
        return rows
    floats = float_columns(layout, rows)
    parts = [floats[..., : layout.vector_size]] if layout.vector_size else []
    for leaf in layout.leaves:
        if leaf.kind == "one_hot":
            parts += one_hot(leaf, floats)
        elif leaf.kind == "image":
            parts.append(image_features(encoder, leaf, parameters, encoder_name(trunk, leaf), image(leaf, rows)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
