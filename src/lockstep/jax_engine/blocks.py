"""A device's shards as blocks: each by itself (reduction exact), or all of them as one (fast).

A function of one block is all that rollout, advantages, moments and gradients consist of. In ``exact`` a block is one
shard and the function is called shard by shard in a loop whose body is compiled once, whatever number of shards a
device owns: a loop of a length known beforehand would be inlined for one shard, and the same lines then round
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp


@dataclass(frozen=True)
class Blocks:
    """How the shards of one device are grouped.

    Attributes:
        shards: of the device; ``rows`` environments in each.
        rows: see ``shards``.
        exact: whether a block is one shard; else all of them are one block.
    """

    shards: int
    rows: int
    exact: bool

    @property
    def count(self) -> int:
        """Blocks of the device."""
        return self.shards if self.exact else 1

    @property
    def size(self) -> int:
        """Environments of a block."""
        return self.rows * self.shards // self.count

    def merge(self, tree: Any, axis: int = 1) -> Any:
        """Arrays ``[shards, …, rows, …]`` with environments on ``axis`` as ``[blocks, …, size, …]``."""
        if self.exact:
            return tree

        def of(x: Array) -> Array:
            moved = jnp.moveaxis(x, 0, axis - 1)
            return moved.reshape(1, *moved.shape[: axis - 1], self.size, *moved.shape[axis + 1 :])

        return jax.tree.map(of, tree)

    def split(self, tree: Any, axis: int = 1) -> Any:
        """The reverse of :meth:`merge`."""
        if self.exact:
            return tree

        def of(x: Array) -> Array:
            parts = x[0].reshape(*x.shape[1:axis], self.shards, self.rows, *x.shape[axis + 1 :])
            return jnp.moveaxis(parts, axis - 1, 0)

        return jax.tree.map(of, tree)

    def merge_indices(self, index: Array) -> Array:
        """Indices into each shard's units ``[shards, …, n]`` as indices into a block's ``[blocks, …, shards·n]``.

        A unit is a sample or a sequence; they lie time-major, ``chunk·rows + environment``.
        """
        if self.exact:
            return index
        shard = jnp.arange(self.shards, dtype=index.dtype).reshape(-1, *(1,) * (index.ndim - 1))
        whole = (index // self.rows) * self.size + shard * self.rows + index % self.rows
        moved = jnp.moveaxis(whole, 0, -2)
        return moved.reshape(1, *moved.shape[:-2], self.shards * index.shape[-1])

    def spread(self, values: Array, n: int) -> Array:
        """One number a shard ``[shards, …]`` for each of its ``n`` units in a block: ``[blocks, …, 1 or shards·n]``."""
        if self.exact:
            return values[..., None]
        moved = jnp.moveaxis(values, 0, -1)
        return jnp.repeat(moved, n, axis=-1)[None]

    def each(self, function: Callable[..., Any], owned: Array, *trees: Any) -> Any:
        """Call a function of one block for each block.

        Args:
            function: takes one block's arrays.
            owned: number of blocks, int32; an argument of the program, so that the compiler doesn't know it.
            trees: arrays ``[blocks, …]``.

        Returns:
            Its results, ``[blocks, …]``.
        """
        if not self.exact:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], trees)))
        return each_shard(function, self.count, owned, *trees)

    def sum_parts(self, function: Callable[..., Any], parts: int, owned: Array, *trees: Any) -> Any:
        """As :meth:`each`, of a function of one part of a block, whose results are summed over the block's parts.

        Args:
            function: takes one part's arrays.
            parts: of each block.
            owned: see :meth:`each`.
            trees: arrays ``[blocks·parts, …]``.

        Returns:
            Sums, in the order of parts: ``[blocks, …]``.
        """
        if not self.exact and parts == 1:
            return self.each(function, owned, *trees)
        shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], trees))
        if not self.exact:
            zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            add = lambda sums, part: (jax.tree.map(jnp.add, sums, function(*part)), None)  # noqa: E731
            return jax.tree.map(lambda x: x[None], lax.scan(add, zeros, trees)[0])
        trees = _never_one(trees)
        sums = jax.tree.map(lambda shape: _empty(max(self.count, 2), shape), shapes)

        def body(i: Array, sums: Any) -> Any:
            one = function(*jax.tree.map(lambda x: x[i], trees))
            return jax.tree.map(lambda all_, x: all_.at[i // parts].add(x), sums, one)

        sums = lax.fori_loop(0, owned * parts, body, sums)
        return jax.tree.map(lambda x: x[: self.count], sums)


def each_shard(function: Callable[..., Any], count: int, owned: Array, *trees: Any) -> Any:
    """Call a function of one shard's arrays for each of ``[count, …]``, in a loop that is never unrolled.

    A single shard lies in arrays of two, of which one is looked at: a loop that reads and writes the whole of an array
    is not compiled as one that reads and writes parts of it, and sums come out otherwise.
    """
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], trees))
    trees = _never_one(trees)
    results = jax.tree.map(lambda shape: _empty(max(count, 2), shape), shapes)

    def body(i: Array, results: Any) -> Any:
        one = function(*jax.tree.map(lambda x: x[i], trees))
        return jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, i, 0), results, one)

    results = lax.fori_loop(0, owned, body, results)
    return results if count > 1 else jax.tree.map(lambda x: x[:count], results)


def _never_one(trees: Any) -> Any:
    return jax.tree.map(lambda x: jnp.concatenate([x, x]) if len(x) == 1 else x, trees)


def _empty(count: int, shape: Any) -> Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(jax.random.key(0, impl=str(jax.random.key_impl(shape))))
        return jax.random.wrap_key_data(jnp.zeros((count, *shape.shape, *words.shape), words.dtype))
    with jax.enable_x64(True):
        return jnp.zeros((count, *shape.shape), shape.dtype)
