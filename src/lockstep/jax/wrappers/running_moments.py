"""Running mean and variance inside a compiled program: batches, spread over devices or not, merged into one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningMoments:
    """Count ``[]``, mean and sum of squared deviations ``m2`` (of one sample's shape), float32."""

    count: Array
    mean: Array
    m2: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> RunningMoments:
        """Moments of nothing, of samples of this shape."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    @property
    def variance(self) -> Array:
        """Population variance; ones as long as there are less than two samples."""
        return jnp.where(self.count > 1, self.m2 / jnp.maximum(self.count, 1), 1.0)

    def merged(self, samples: Array, axis_name: str | tuple[str, ...] | None = None) -> RunningMoments:
        """Merges further samples ``[n, …]``, those of all devices along ``axis_name`` too (Chan et al. 1983)."""
        x = samples.astype(jnp.float32)
        count, mean = jnp.asarray(x.shape[0], jnp.float32), x.mean(0)
        m2 = jnp.square(x - mean).sum(0)
        if axis_name is not None:  # every device has as many samples
            whole = lax.pmean(mean, axis_name)
            m2 = lax.psum(m2 + count * jnp.square(mean - whole), axis_name)
            count, mean = lax.psum(count, axis_name), whole
        total = self.count + count
        delta = mean - self.mean
        m2 = self.m2 + m2 + jnp.square(delta) * (self.count * count / total)
        return RunningMoments(total, self.mean + delta * (count / total), m2)
