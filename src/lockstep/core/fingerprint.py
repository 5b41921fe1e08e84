"""Fingerprints of arrays, and the comparison of ranks by them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.core.errors import DesyncError

OUT_OF_SYNC = "ranks are out of sync"
"""Begins the message of a ``DesyncError`` of a run."""


def array_digest(array: np.ndarray) -> bytes:
    """Returns eight bytes that depend on every bit of an array, its shape and its dtype."""
    digest = hashlib.blake2b(f"{_dtype_name(array)}{array.shape}".encode(), digest_size=8)
    digest.update(_bytes(array))
    return digest.digest()


def fingerprints(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns one int64 per array, in the mapping's order."""
    return np.frombuffer(b"".join(array_digest(a) for a in arrays.values()), np.int64)


def sha256_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns one hex digest of all arrays: names, dtypes, shapes and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{_dtype_name(array)}|{array.shape}|".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _dtype_name(array: np.ndarray) -> str:
    """Returns NumPy's code of a dtype, or the name of one that another package added (bfloat16), which has no code."""
    dtype = array.dtype
    return dtype.name if dtype.kind == "V" and dtype.type is not np.void else dtype.str


def _bytes(array: np.ndarray) -> memoryview:
    """Returns an array's bytes in C order; viewed as bytes, because the buffer protocol knows no bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def compare_ranks(names: Sequence[str], rows: np.ndarray, when: str) -> None:
    """Raises a ``DesyncError`` unless every rank's fingerprints ``[world_size, arrays]`` equal those of rank 0."""
    differs = rows != rows[0]
    if not differs.any():
        return
    ranks = np.flatnonzero(differs.any(1)).tolist()
    tensors = np.flatnonzero(differs.any(0)).tolist()
    listed = ", ".join(map(str, ranks))
    raise DesyncError(
        f"{OUT_OF_SYNC} {when}: rank{'s' if len(ranks) > 1 else ''} {listed} of {len(rows)} hold"
        f"{'s' if len(ranks) == 1 else ''} other bytes than rank 0 in {len(tensors)} of {len(names)} tensors, "
        f"first {names[tensors[0]]}"
    )
