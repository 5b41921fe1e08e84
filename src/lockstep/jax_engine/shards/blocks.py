"""Groups a device's shards into blocks: one shard each (reduction exact), or several (fast).

Rollout, advantages, moments and gradients are functions of one block. With ``exact`` a block is one shard. The function
is called shard by shard, in a loop whose body is compiled once, whatever number of shards a device owns. If the loop's
length were known beforehand, the compiler would inline it for one shard, and the same lines would round differently.
With ``fast`` an accelerator has one block. On a CPU, where large blocks leave the cache, only shards of few
environments are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from lockstep.jax_engine.shards.keys import is_key

CPU_BLOCK_ENVS = 64
"""Shards are joined on a CPU until a block has this many environments."""


def shards_together(shards: int, rows: int, device: str) -> int:
    """Returns the shards of a block in ``fast``: all of a device, or on a ``cpu`` the fewest that make a large one."""
    if device != "cpu":
        return shards
    large = (n for n in range(1, shards) if shards % n == 0 and n * rows >= CPU_BLOCK_ENVS)
    return next(large, shards)


Tree = TypeVar("Tree")
Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")


@dataclass(frozen=True)
class Blocks:
    """Says how the shards of one device are grouped.

    Attributes:
        shards: of the device; ``rows`` are the environments of each.
        exact: whether sums are kept by block, and functions are always called in a loop.
        together: shards in a block, side by side; 1 with ``exact``, and if devices own different numbers.
        even: whether all devices own equally many; else ``shards`` is the most that one owns.
    """

    shards: int
    rows: int
    exact: bool
    together: int = 1
    even: bool = True

    @property
    def count(self) -> int:
        """Number of blocks of the device."""
        return self.shards // self.together

    @property
    def loops(self) -> bool:
        """Whether functions are called in a loop over blocks; a single block in ``fast`` needs none."""
        return self.exact or self.count > 1 or not self.even

    @property
    def size(self) -> int:
        """Number of environments in a block."""
        return self.rows * self.together

    def merge(self, tree: Tree, axis: int = 1) -> Tree:
        """Merges arrays ``[shards, …, rows, …]`` with environments on ``axis`` into ``[blocks, …, size, …]``."""
        if self.together == 1:
            return tree

        def of(x: Array) -> Array:
            moved = jnp.moveaxis(x.reshape(self.count, self.together, *x.shape[1:]), 1, axis)
            return moved.reshape(self.count, *x.shape[1:axis], self.size, *x.shape[axis + 1 :])

        return jax.tree.map(of, tree)

    def split(self, tree: Tree, axis: int = 1) -> Tree:
        """Splits blocks into shards: the reverse of :meth:`merge`."""
        if self.together == 1:
            return tree

        def of(x: Array) -> Array:
            parts = x.reshape(self.count, *x.shape[1:axis], self.together, self.rows, *x.shape[axis + 1 :])
            return jnp.moveaxis(parts, axis, 1).reshape(self.shards, *x.shape[1:axis], self.rows, *x.shape[axis + 1 :])

        return jax.tree.map(of, tree)

    def merge_indices(self, index: Array) -> Array:
        """Converts indices of shards' units ``[shards, …, n]`` to those of their blocks', ``[blocks, …, together·n]``.

        A unit is a sample or a sequence. Units are time-major: ``chunk·rows + environment``.
        """
        if self.together == 1:
            return index
        place = jnp.arange(self.shards, dtype=index.dtype).reshape(-1, *(1,) * (index.ndim - 1)) % self.together
        whole = (index // self.rows) * self.size + place * self.rows + index % self.rows
        moved = jnp.moveaxis(whole.reshape(self.count, self.together, *index.shape[1:]), 1, -2)
        return moved.reshape(self.count, *index.shape[1:-1], self.together * index.shape[-1])

    def spread(self, values: Array, n: int) -> Array:
        """Repeats each shard's number ``[shards, …]`` for its ``n`` units in a block, ``[blocks, …, together·n]``.

        If a block is one shard, the number stays single: ``[blocks, …, 1]``.
        """
        if self.together == 1:
            return values[..., None]
        moved = jnp.moveaxis(values.reshape(self.count, self.together, *values.shape[1:]), 1, -1)
        return jnp.repeat(moved, n, axis=-1)

    def each(self, function: Callable[[*Trees], Result], owned: Array, *trees: *Trees) -> Result:
        """Calls a function of one block's arrays for each of ``[blocks, …]``; returns its results ``[blocks, …]``.

        ``owned`` is the number of this device's shards, int32. It is an argument of the program, so that the compiler
        doesn't know it.
        """
        if not self.loops:
            return jax.tree.map(lambda x: x[None], function(*_at(trees, 0)))
        return each_shard(function, self.count, owned if self.together == 1 else owned // self.together, *trees)

    def sum_parts(self, function: Callable[[*Trees], Result], parts: int, owned: Array, *trees: *Trees) -> Result:
        """Calls a function of one part of a block for each of ``[blocks·parts, …]``, and sums its results in order.

        Returns sums over each block's parts ``[blocks, …]`` with ``exact``, over all parts ``[1, …]`` with ``fast``.
        """
        if not self.exact and self.even and self.count * parts == 1:
            return self.each(function, owned, *trees)
        function = traced_once(function)
        shapes = jax.eval_shape(function, *_at(trees, 0))
        if not self.exact:
            zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

            def add(sums: Result, part: tuple[*Trees]) -> tuple[Result, None]:
                return jax.tree.map(jnp.add, sums, function(*part)), None

            if self.even:
                total = lax.scan(add, zeros, trees)[0]
            else:
                total = lax.fori_loop(0, owned * parts, lambda i, sums: add(sums, _at(trees, i))[0], zeros)
            return jax.tree.map(lambda x: x[None], total)
        doubled = _never_one(trees)
        sums = jax.tree.map(lambda shape: _empty(max(self.count, 2), shape), shapes)

        def body(i: Array, sums: Result) -> Result:
            one = function(*_at(doubled, i))
            return jax.tree.map(lambda all_, x: all_.at[i // parts].add(x), sums, one)

        sums = lax.fori_loop(0, owned * parts, body, sums)
        return jax.tree.map(lambda x: x[: self.count], sums)


def traced_once(function: Callable[[*Trees], Result]) -> Callable[[*Trees], Result]:
    """Returns a function that is traced once for arguments of one shape, and adds the same operations to the program.

    Asking for its results' shapes first then costs nothing; else each level of nested loops would trace all twice. The
    function must be used for one loop only, because a collective in it has a number of its own.
    """

    def once(*arguments: *Trees) -> Result:
        return function(*arguments)

    return jax.jit(once, inline=True)


def each_shard(function: Callable[[*Trees], Result], count: int, owned: Array, *trees: *Trees) -> Result:
    """Calls a function of one shard's arrays for each of ``[count, …]``, in a loop that is never unrolled.

    A single shard is put in arrays of two, of which only one is used. A loop that reads and writes a whole array is
    compiled differently from one that reads and writes parts of it, and its sums round differently.
    """
    function = traced_once(function)
    shapes = jax.eval_shape(function, *_at(trees, 0))
    doubled = _never_one(trees)
    results = jax.tree.map(lambda shape: _empty(max(count, 2), shape), shapes)

    def body(i: Array, results: Result) -> Result:
        one = function(*_at(doubled, i))
        return jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, i, 0), results, one)

    results = lax.fori_loop(0, owned, body, results)
    return results if count > 1 else jax.tree.map(lambda x: x[:count], results)


def _at(trees: tuple[*Trees], i: Array | int) -> tuple[*Trees]:
    return jax.tree.map(lambda x: x[i], trees)


def _never_one(trees: Tree) -> Tree:
    """Puts single rows in arrays of two; the second row, which is never used, is zeros (for keys, the same key)."""

    def of(x: Array) -> Array:
        if len(x) > 1:
            return x
        if is_key(x):
            return jnp.concatenate([x, x])
        return jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(of, trees)


def _empty(count: int, shape: jax.ShapeDtypeStruct) -> Array:
    if is_key(shape):
        kind = str(jax.random.key_impl(shape))  # pyright: ignore[reportArgumentType]
        words = jax.random.key_data(jax.random.key(0, impl=kind))
        return jax.random.wrap_key_data(jnp.zeros((count, *shape.shape, *words.shape), words.dtype), impl=kind)
    with jax.enable_x64(True):
        return jnp.zeros((count, *shape.shape), shape.dtype)
