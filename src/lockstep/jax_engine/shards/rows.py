"""Says where shards lie in arrays over the mesh: every device has as many rows as the one that owns most shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.core.tree import Tree


@dataclass(frozen=True)
class ShardRows:
    """The rows of all devices; some belong to no shard if shards don't divide over devices.

    Attributes:
        tree: says who owns which shards.
    """

    tree: Tree

    @property
    def count(self) -> int:
        """Number of rows of all devices."""
        return len(self.tree.owned) * self.tree.most_shards

    @cached_property
    def owned(self) -> np.ndarray:
        """Number of shards that each device owns, int32 ``[devices]``."""
        return np.array([len(own) for own in self.tree.owned], np.int32)

    @cached_property
    def of_shards(self) -> np.ndarray:
        """The row of each shard, int64 ``[num_shards]``."""
        most = self.tree.most_shards
        return np.concatenate([device * most + np.arange(len(own)) for device, own in enumerate(self.tree.owned)])

    @cached_property
    def shard_of_row(self) -> np.ndarray:
        """The shard of each row, int64 ``[rows]``; for a row without one, the device's first."""
        out = np.repeat([own.start for own in self.tree.owned], self.tree.most_shards)
        out[self.of_shards] = np.arange(self.tree.num_shards)
        return out

    def laid_out(self, x: np.ndarray, devices: Sequence[int] | None = None, axis: int = 0) -> np.ndarray:
        """Lays shards ``[shards, …]`` out as the rows of ``devices`` (None: all), with zeros where no shard is."""
        if self.tree.even:
            return x
        shape = list(x.shape)
        places = self._places(devices)
        shape[axis] = self.tree.most_shards * (len(self.tree.owned) if devices is None else len(devices))
        out = np.zeros(shape, x.dtype)
        out[(slice(None),) * axis + (places,)] = x
        return out

    def shards_alone(self, x: np.ndarray, devices: Sequence[int] | None = None, axis: int = 0) -> np.ndarray:
        """Extracts the shards from rows; the reverse of :meth:`laid_out`."""
        return x if self.tree.even else np.take(x, self._places(devices), axis)

    def _places(self, devices: Sequence[int] | None) -> np.ndarray:
        if devices is None:
            return self.of_shards
        most, counts = self.tree.most_shards, self.owned[list(devices)]
        return np.concatenate([place * most + np.arange(n) for place, n in enumerate(counts)])
