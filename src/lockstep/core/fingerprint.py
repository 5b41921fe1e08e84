"""Fingerprints of arrays, and what they say about ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.core.errors import DesyncError


def array_digest(array: np.ndarray) -> bytes:
    """Eight bytes that depend on every bit of an array, its shape and dtype."""
    digest = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def fingerprints(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """One int64 per array, in the mapping's order."""
    return np.frombuffer(b"".join(array_digest(a) for a in arrays.values()), np.int64)


def sha256_of(arrays: Mapping[str, np.ndarray]) -> str:
    """One hex digest of all arrays: names, dtypes, shapes and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def compare_ranks(names: Sequence[str], rows: np.ndarray, when: str) -> None:
    """Raise a ``DesyncError`` unless every rank's fingerprints ``[world_size, arrays]`` are rank 0's."""
    differs = rows != rows[0]
    if not differs.any():
        return
    ranks = np.flatnonzero(differs.any(1)).tolist()
    tensors = np.flatnonzero(differs.any(0)).tolist()
    listed = ", ".join(map(str, ranks))
    raise DesyncError(
        f"ranks are out of sync {when}: rank{'s' if len(ranks) > 1 else ''} {listed} of {len(rows)} hold"
        f"{'s' if len(ranks) == 1 else ''} other bytes than rank 0 in {len(tensors)} of {len(names)} tensors, "
        f"first {names[tensors[0]]}"
    )
