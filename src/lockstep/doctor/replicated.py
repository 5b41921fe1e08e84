"""Checks that all devices and processes of JAX hold equal copies of arrays that should be replicated."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer

from lockstep.config.on_off import switch
from lockstep.core.errors import DesyncError
from lockstep.core.fingerprint import array_digest
from lockstep.jax_engine.distributed.processes import gather_json
from lockstep.jax_engine.shards.keys import is_key


def check_replicated(pytree: Any, *, device_axis: bool = False) -> int:
    """Compares all copies of every leaf, bit for bit, on all devices of all processes.

    JAX trusts a sharding that says devices hold the same array. After ``shard_map`` without its check, or with
    different data in each process, they may not. If an array is sharded over some axes of a mesh and replicated over
    others, the copies of each part are compared. With several processes this is a collective: all must call it, with
    trees of the same structure.

    Args:
        pytree: of ``jax.Array`` (PRNG keys too), NumPy arrays and numbers; each process holds one copy of the latter
            two. Other leaves (functions of an Equinox module) are skipped.
        device_axis: whether the leading axis of every array counts copies, as in ``pmap`` and
            ``lockstep.jax.replicate``: its slices are compared with one another. If False, each device's slice of such
            an array is a different part, with no copy to compare. Numbers have no such axis.

    Returns:
        The number of leaves that had several copies to compare; 0 means that nothing was compared.

    Raises:
        DesyncError: in every process; one line that names the first leaf, how many differ, and where.
        ValueError: ``device_axis`` is neither True nor False, or a leaf has no bytes to compare; one line.
    """
    counts_copies = switch("device_axis", device_axis)
    leaves = tree_util.tree_flatten_with_path(pytree)[0]
    for path, leaf in leaves:
        _check_has_bytes(tree_util.keystr(path) or "the tree", leaf)
    mine = {
        tree_util.keystr(path) or "the tree": _copies(leaf, counts_copies)
        for path, leaf in leaves
        if _holds_numbers(leaf)
    }
    everyone: list[dict[str, Any]] = gather_json(mine)
    names = list(everyone[0])
    for rank, theirs in enumerate(everyone):
        if list(theirs) != names:
            odd = sorted(set(theirs) ^ set(names)) or ["their order"]
            raise DesyncError(f"processes 0 and {rank} hold trees of different structure: {len(odd)} leaves, {odd[0]}")
    merged = {name: _merged([theirs[name] for theirs in everyone]) for name in names}
    unlike = [name for name in names if any(len(set(copies.values())) > 1 for copies in merged[name].values())]
    if unlike:
        raise DesyncError(
            f"not replicated: {len(unlike)} of {len(names)} leaves differ between their copies, first "
            f"{unlike[0]}: {_who(merged[unlike[0]])}"
        )
    return sum(any(len(copies) > 1 for copies in parts.values()) for parts in merged.values())


def _check_has_bytes(name: str, leaf: Any) -> None:
    """Raises a one-line ``ValueError`` for a leaf that stands for an array without holding one."""
    if isinstance(leaf, Tracer):
        raise ValueError(f"{name} is traced and has no bytes yet; call check_replicated outside of jit, pmap and grad")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{name} was deleted or donated to a jitted call; give what that call returned")


def _holds_numbers(leaf: Any) -> bool:
    """Returns whether a leaf is an array or a number; NumPy would wrap any other object as a pointer."""
    return isinstance(leaf, jax.Array) or np.asarray(leaf).dtype != object


def _copies(leaf: Any, device_axis: bool) -> dict[str, dict[str, str]]:
    """Returns the digest of each holder's copy, by part of the leaf: ``{part: {holder: digest}}``."""
    holder = f"process {jax.process_index()}"
    device_axis = device_axis and np.ndim(leaf) > 0
    out: dict[str, dict[str, str]] = {}
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        if device_axis:
            return {
                "whole": {
                    f"slice {n} of {holder}": array_digest(np.asarray(each)).hex() for n, each in enumerate(array)
                }
            }
        return {"whole": {holder: array_digest(array).hex()}}
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    for shard in leaf.addressable_shards:
        bounds = [index.indices(size) for index, size in zip(shard.index, leaf.shape, strict=True)]
        data, name = np.asarray(shard.data), f"device {shard.device.id}"
        if device_axis:
            first = bounds[0][0]
            found = {f"slice {first + n} on {name}": each for n, each in enumerate(data)}
        else:
            found = {name: data}
        held = out.setdefault(str(bounds[1:] if device_axis else bounds), {})
        held |= {where: array_digest(np.asarray(each)).hex() for where, each in found.items()}
    return out


def _merged(everyone: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    out: dict[str, dict[str, str]] = {}
    for process, parts in enumerate(everyone):
        for part, copies in parts.items():
            for name, digest in copies.items():
                alone = len(everyone) == 1 or "process" in name
                out.setdefault(part, {})[name if alone else f"{name} of process {process}"] = digest
    return out


def _who(parts: dict[str, dict[str, str]]) -> str:
    copies = next(copies for copies in parts.values() if len(set(copies.values())) > 1)
    first = next(iter(copies))
    others = [name for name, digest in copies.items() if digest != copies[first]]
    return f"{', '.join(others[:8])} against {first}"
