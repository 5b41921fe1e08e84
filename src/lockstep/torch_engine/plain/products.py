"""Products of the few rows that each shard has in one step of time, for all shards of a rank at once.

A product of one row goes to the BLAS's routine for a vector, which reads the whole weight again for each shard, and
adds in another order than the one for several rows. From two rows on, a row's bits hardly ever depend on how many there
are with OpenBLAS's kernels for AVX-512 if no factor is transposed, so that all shards' rows can be one factor. Whether
that is so is tested here, for each shape; where it isn't, as with the kernels for AVX2, each shard's rows are
multiplied alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

FEW_ROWS = 16  # of a shard; with more, a product of a shard's own is as fast
PAIRED = 1 << 16  # numbers of a weight; with more, a product of two rows takes longer than one of one row
SHARDS = (2, 3, 4, 8, 16)  # whose lone rows are compared before any is paired
NARROW = 8  # outputs; with fewer, rows differ in so few of their numbers that a comparison could miss it
COMPARED = 1 << 12  # numbers, at least


class RowProduct:
    """Multiplies rows ``[trunks, k, n, in]`` of ``k`` shards by each trunk's weight ``[trunks, in, out]``.

    A shard's bits are those of its own rows; those of a lone row are the ones that it has beside another if
    :func:`pairs` says so. Neither depends on ``k``.

    Args:
        weights: as :func:`laid_out` returns them, or not transposed in memory.
        k: shards; ``n``: rows of each.
    """

    def __init__(self, weights: np.ndarray, k: int, n: int) -> None:
        trunks, inputs, outputs = weights.shape
        dtype = weights.dtype
        self.out = np.empty((trunks, k, n, outputs), dtype)
        """Where each call writes the results, ``[trunks, k, n, out]``."""
        paired = n == 1 and pairs(inputs, outputs, dtype.str)
        self._call: Callable[[np.ndarray], object]
        comparable = weights.flags.c_contiguous and (paired or n > 1)
        if k > 1 and comparable and joins(k, n, inputs, outputs, dtype.str):
            rows = (trunks, k * n)
            results = self.out.reshape(*rows, outputs)
            self._call = lambda x: np.matmul(x.reshape(*rows, inputs), weights, out=results)
        elif paired:
            beside, results = np.zeros((trunks, k, 2, inputs), dtype), np.empty((trunks, k, 2, outputs), dtype)
            self.out, first, weights = results[:, :, :1], beside[:, :, :1], weights[:, None]

            def call(x: np.ndarray) -> None:
                first[...] = x
                np.matmul(beside, weights, out=results)

            self._call = call
        else:
            weights = weights[:, None]
            self._call = lambda x: np.matmul(x, weights, out=self.out)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Multiplies contiguous rows ``[trunks, k, n, in]``; returns :attr:`out`, which the next call overwrites."""
        self._call(x)
        return self.out


def laid_out(transposed: np.ndarray) -> np.ndarray:
    """Copies transposed weights ``[trunks, in, out]`` for products of few rows.

    They aren't transposed in memory any more if lone rows are paired. Other kernels are as fast with a transpose.
    """
    inputs, outputs = transposed.shape[1:]
    return transposed.copy("C" if pairs(inputs, outputs, transposed.dtype.str) else "K")


@functools.cache
def pairs(inputs: int, outputs: int, dtype: str) -> bool:
    """Returns whether lone rows are multiplied beside another: if lone rows of several shards can be one factor then.

    That depends on the weight's shape and on the BLAS's kernels alone, so ranks agree.
    """
    return inputs * outputs <= PAIRED and all(joins(k, 1, inputs, outputs, dtype) for k in SHARDS)


@functools.cache
def joins(k: int, n: int, inputs: int, outputs: int, dtype: str) -> bool:
    """Returns whether rows of ``k`` shards, ``n`` each, have the same bits in one product as in products by shard.

    This is of a weight that isn't transposed in memory. A lone row's product by shard is the one beside a row of zeros.
    Compares them on random numbers: the order in which a product adds doesn't depend on what it adds.
    """
    if n > FEW_ROWS or outputs < NARROW:
        return False
    generator = np.random.Generator(np.random.Philox(key=n))
    for _ in range(max(3, math.ceil(COMPARED / (k * n * outputs)))):
        weight = generator.standard_normal((inputs, outputs)).astype(dtype)
        rows = np.zeros((k, max(2, n), inputs), dtype)
        rows[:, :n] = generator.standard_normal((k, n, inputs))
        joined = np.matmul(rows[:, :n].reshape(k * n, inputs), weight)
        if not np.array_equal(joined.reshape(k, n, outputs), np.matmul(rows, weight)[:, :n]):
            return False
    return True
