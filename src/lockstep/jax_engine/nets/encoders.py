"""Encodes observation rows as features: numbers as they are, indices as one-hot vectors, images by convolutions."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.core.spaces import Leaf, ObservationLayout, descend
from lockstep.jax_engine.nets.layers import Convolution, Linear, named
from lockstep.jax_engine.nets.pooling import max_pool
from lockstep.networks.spec import IMPALA, NATURE, ImageEncoder, encoder_name


def float_columns(layout: ObservationLayout, rows: Array) -> Array:
    """Returns the float32 columns ``[…, float_size]`` of observation rows ``[…, width]``."""
    if not layout.image_bytes:
        return rows
    words = rows[..., : 4 * layout.float_size].reshape(*rows.shape[:-1], layout.float_size, 4)
    return lax.bitcast_convert_type(words, jnp.float32)


def action_mask(layout: ObservationLayout, rows: Array) -> Array | None:
    """Returns which actions are allowed, bool ``[…, choices]``; None if all are."""
    leaf = layout.mask
    return None if leaf is None else float_columns(layout, rows)[..., leaf.start : leaf.start + leaf.size] > 0.5


def encode_rows(layout: ObservationLayout, observation: Any) -> Array:
    """Encodes a batch of observations as rows ``[n, width]``; :meth:`ObservationLayout.encode` does so on the host.

    Observations have the environment's own structure, leaves ``[n, …]``. A mask that isn't part of them allows all
    actions.

    Raises:
        ValueError: if a part's shape isn't its space's, or an image isn't made of integers.
    """
    first = next(leaf for leaf in layout.leaves if not leaf.apart)
    count = len(descend(observation, first.name))
    floats, pixels = [], []
    for leaf in layout.leaves:
        value = jnp.ones((count, *leaf.shape)) if leaf.apart else descend(observation, leaf.name)
        columns = _columns(leaf, jnp.asarray(value), count)
        (pixels if leaf.kind == "image" else floats).append(columns)
    if not pixels:
        return floats[0] if len(floats) == 1 else jnp.concatenate(floats, -1)
    words = [lax.bitcast_convert_type(x, jnp.uint8).reshape(count, -1) for x in floats]
    filling = jnp.zeros((count, layout.width - 4 * layout.float_size - layout.image_bytes), jnp.uint8)
    return jnp.concatenate([*words, *pixels, filling], -1)


def decode_rows(layout: ObservationLayout, rows: Array) -> Any:
    """Decodes rows ``[n, width]`` as the environment observed them: an array, or a (nested) dict of arrays; no mask.

    A Tuple becomes a dict with keys ``"0"``, ``"1"`` and so on.
    """
    floats, out = float_columns(layout, rows), {}
    for leaf in layout.leaves:
        if leaf.apart:
            continue
        part = (rows if leaf.kind == "image" else floats)[..., leaf.start : leaf.start + leaf.size]
        if leaf.kind == "one_hot":
            part = part.astype(jnp.int32) + jnp.asarray(leaf.first or (0,) * leaf.size, jnp.int32)
        inside, (*path, last) = out, leaf.name.split("/")
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = part.reshape(len(rows), *leaf.shape)
    return out.get("", out)


def _columns(leaf: Leaf, value: Array, count: int) -> Array:
    """Flattens one part ``[n, size]``: pixels as uint8, the rest as float32, indices counted from 0."""
    if leaf.kind == "image" and not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"observation of dtype {value.dtype}, its space says uint8")
    if value.shape != (count, *leaf.shape):
        what = f" part {leaf.name!r}" if leaf.name else ""
        raise ValueError(f"observation{what} of shape {value.shape}, its space says {(count, *leaf.shape)}")
    flat = value.reshape(count, leaf.size)
    if leaf.kind == "image":
        return flat.astype(jnp.uint8)
    flat = flat - jnp.asarray(leaf.first, flat.dtype) if any(leaf.first) else flat
    return flat.astype(jnp.float32)


def one_hot(leaf: Leaf, floats: Array) -> list[Array]:
    """Converts a Discrete or MultiDiscrete part to one-hot vectors ``[…, choices]``."""
    columns = floats[..., leaf.start : leaf.start + leaf.size].astype(jnp.int32)
    if leaf.pattern != leaf.choices:  # all repetitions at once: a grid has dozens
        columns = columns.reshape(*columns.shape[:-1], -1, len(leaf.pattern))
        parts = [jax.nn.one_hot(columns[..., n], count) for n, count in enumerate(leaf.pattern)]
        return [jnp.concatenate(parts, -1).reshape(*columns.shape[:-2], -1)]
    return [jax.nn.one_hot(columns[..., n], count) for n, count in enumerate(leaf.choices)]


def image(leaf: Leaf, rows: Array) -> Array:
    """Extracts an image ``[…, H, W, C]`` from rows, float32 between 0 and 1."""
    shape = leaf.shape if len(leaf.shape) == 3 else (*leaf.shape, 1)
    pixels = rows[..., leaf.start : leaf.start + leaf.size].reshape(*rows.shape[:-1], *shape)
    if leaf.channels_first and len(leaf.shape) == 3:
        pixels = jnp.moveaxis(pixels, -3, -1)
    return pixels.astype(jnp.float32) * (1.0 / leaf.high)


class Residual(eqx.Module):
    """A residual block of two convolutions (Espeholt et al. 2018, figure 3, right)."""

    first: Convolution
    second: Convolution

    def __call__(self, x: Array) -> Array:
        """Transforms images ``[n, H, W, C]``."""
        return x + self.second(jax.nn.relu(self.first(jax.nn.relu(x))))


class Stage(eqx.Module):
    """A convolution, a pool that halves the image (not for small grids), and residual blocks."""

    convolution: Convolution
    blocks: tuple[Residual, ...]
    pooled: bool = eqx.field(static=True, default=True)

    def __call__(self, x: Array) -> Array:
        """Transforms images ``[n, H, W, C]``."""
        x = self.convolution(x)
        x = max_pool(x) if self.pooled else x
        for block in self.blocks:
            x = block(x)
        return x


class ImageNet(eqx.Module):
    """The encoder of one image: convolutions or stages, and a linear layer.

    A ReLU follows each convolution, or the last stage. The result is flattened in the order ``[C, H, W]``.
    """

    parts: tuple[Convolution, ...] | tuple[Stage, ...]
    out: Linear

    def __call__(self, x: Array) -> Array:
        """Computes features ``[n, features]`` of images ``[n, H, W, C]``."""
        for part in self.parts:
            x = jax.nn.relu(part(x)) if isinstance(part, Convolution) else part(x)
        if isinstance(self.parts[-1], Stage):
            x = jax.nn.relu(x)
        return jax.nn.relu(self.out(jnp.moveaxis(x, -1, 1).reshape(len(x), -1)))


class Encoder(eqx.Module):
    """Encodes observation rows as features, with one encoder per image in the layout's order."""

    images: tuple[ImageNet, ...]
    layout: ObservationLayout = eqx.field(static=True)

    def __call__(self, rows: Array) -> Array:
        """Computes features ``[n, features]`` of rows ``[n, width]``."""
        layout = self.layout
        if layout.plain:
            return rows
        floats, networks = float_columns(layout, rows), iter(self.images)
        parts = [floats[..., : layout.vector_size]] if layout.vector_size else []
        for leaf in layout.leaves:
            if leaf.kind == "one_hot":
                parts += one_hot(leaf, floats)
            elif leaf.kind == "image":
                parts.append(next(networks)(image(leaf, rows)).astype(jnp.float32))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def named_encoder(layout: ObservationLayout, encoder: ImageEncoder, trunk: str) -> Encoder:
    """Makes a network's encoder with the names of its parameters in place of arrays."""
    leaves = [leaf for leaf in layout.leaves if leaf.kind == "image"]
    return Encoder(tuple(_named_image_net(encoder, leaf, encoder_name(trunk, leaf)) for leaf in leaves), layout)


def _named_image_net(encoder: ImageEncoder, leaf: Leaf, name: str) -> ImageNet:
    kind = encoder.resolved(leaf)
    if kind == "nature":
        parts = tuple(named(Convolution, f"{name}.{n}", stride) for n, (_, _, stride) in enumerate(NATURE))
    elif kind == "simple":
        parts = tuple(named(Convolution, f"{name}.{n}", 1, 1) for n in range(encoder.depth))
    elif kind == "residual":
        parts = (_named_stage(f"{name}.0", encoder.depth, pooled=False),)
    else:
        parts = tuple(_named_stage(f"{name}.{stage}", encoder.depth) for stage in range(len(IMPALA)))
    return ImageNet(parts, named(Linear, f"{name}.out"))


def _named_stage(name: str, blocks: int, pooled: bool = True) -> Stage:
    convolutions = [[named(Convolution, f"{name}.{block}.{n}", 1, 1) for n in range(2)] for block in range(blocks)]
    return Stage(named(Convolution, name, 1, 1), tuple(Residual(*pair) for pair in convolutions), pooled)
