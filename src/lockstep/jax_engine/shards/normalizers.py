"""Normalises inside the program with moments frozen during an iteration; twin of lockstep.core.normalizers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.core.normalizers import EPSILON
from lockstep.core.spaces import ObservationLayout


class Moments(NamedTuple):
    """Running moments in float64: count ``[]``, mean ``[size]`` and sum of squared deviations ``[size]``."""

    count: Array
    mean: Array
    m2: Array


def empty_moments(size: int) -> Moments:
    """Makes the moments of no samples, float64 on the host."""
    return Moments(np.zeros(()), np.zeros(size), np.zeros(size))  # pyright: ignore[reportArgumentType]


def merged(moments: Moments, count: Array, mean: Array, m2: Array) -> Moments:
    """Merges the moments of further samples into these, in float64 (Chan et al. 1983); a count of 0 changes nothing."""
    with jax.enable_x64(True):
        total = jnp.maximum(moments.count + count, 1.0)
        delta = mean - moments.mean
        return Moments(
            moments.count + count,
            moments.mean + delta * (count / total),
            moments.m2 + m2 + delta * delta * (moments.count * count / total),
        )


class Scale(NamedTuple):
    """The scale of an iteration: the mean is subtracted, then the inverse multiplied; float32 ``[size]``."""

    mean: Array
    inverse_std: Array


def scale_of(moments: Moments) -> Scale:
    """Computes mean and inverse standard deviation; 0 and 1 while there are no samples."""
    with jax.enable_x64(True):
        variance = jnp.where(moments.count > 0, moments.m2 / jnp.maximum(moments.count, 1.0), 1.0)
        return Scale(moments.mean.astype(jnp.float32), (1.0 / jnp.sqrt(variance + EPSILON)).astype(jnp.float32))


def frozen(moments: Moments | None) -> Scale | None:
    """Computes the scale of an iteration from a normaliser's moments, or returns None."""
    return None if moments is None else scale_of(moments)


def normalized(layout: ObservationLayout, rows: Array, scale: Scale | None, clip: float) -> Array:
    """Normalises the vectors of observation rows ``[…, width]``, clipped to ``±clip``.

    Returns them as they are without a ``scale``.
    """
    if scale is None:
        return rows
    size = layout.vector_size
    if not layout.image_bytes:
        vectors = jnp.clip((rows[..., :size] - scale.mean) * scale.inverse_std, -clip, clip)
        return vectors if size == rows.shape[-1] else jnp.concatenate([vectors, rows[..., size:]], -1)
    vectors = jnp.clip((vectors_of(layout, rows) - scale.mean) * scale.inverse_std, -clip, clip)
    raw = lax.bitcast_convert_type(vectors, jnp.uint8).reshape(*rows.shape[:-1], 4 * size)
    return jnp.concatenate([raw, rows[..., 4 * size :]], -1)


def vectors_of(layout: ObservationLayout, rows: Array) -> Array:
    """Extracts the numbers ``[…, vector_size]`` from observation rows ``[…, width]``."""
    size = layout.vector_size
    if not layout.image_bytes:
        return rows[..., :size]
    return lax.bitcast_convert_type(rows[..., : 4 * size].reshape(*rows.shape[:-1], size, 4), jnp.float32)


def scaled_rewards(rewards: Array, scale: Scale | None, clip: float) -> Array:
    """Divides rewards by the standard deviation of the discounted return, clipped to ``±clip``; None leaves them."""
    return rewards if scale is None else jnp.clip(rewards * scale.inverse_std[0], -clip, clip)
