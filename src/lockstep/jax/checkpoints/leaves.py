"""Converts the leaves of a pytree to what a checkpoint holds, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.jax_engine.distributed import placement
from lockstep.jax_engine.shards.keys import is_key
from lockstep.runs.checkpoint import CheckpointError

NUMBERS = (bool, int, float, complex)
KINDS_OF_NUMBERS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
OF_PYTHON = ("int64", "float64", "complex128")
"""Dtypes in which Python's numbers are saved, of which JAX makes arrays of half that size."""
RESERVED = "__metadata__"
"""Name in the header of safetensors under which no array is found again."""
GENERATORS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def name_of(path: Any) -> str:
    """Returns a leaf's name, such as ``opt_state/0/mu``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_saved(leaf: Any) -> bool:
    """Returns whether a leaf is an array, a number or a key; other leaves belong to the code."""
    return isinstance(leaf, (Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *NUMBERS))


def saved_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves that belong into a checkpoint, by name.

    Raises:
        CheckpointError: two share a name, or one has a name that a file of arrays can't hold; one line.
    """
    named = [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if is_saved(leaf)]
    leaves = dict(named)
    if len(leaves) < len(named):
        twice = next(name for name, _ in named if [n for n, _ in named].count(name) > 1)
        raise CheckpointError(f"two leaves of the pytree are named {twice}; rename one")
    if RESERVED in leaves:
        raise CheckpointError(
            f"a leaf of the pytree is named {RESERVED}, which safetensors keep for their own; rename it"
        )
    return leaves


def _kind(leaf: Any) -> str:
    """Returns a leaf's dtype as the checkpoint states it; for a key, its generator."""
    if is_key(leaf):
        return str(leaf.dtype)
    return np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype).name


def to_host(name: str, leaf: Any) -> tuple[np.ndarray, str]:
    """Copies a leaf to the host in a dtype that safetensors know, with its kind; other dtypes are saved as bits.

    Complex numbers of 16 bytes become pairs of floats, along a last axis.
    """
    kind, array = _kind(leaf), placement.gathered(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if array.dtype == np.complex128:
        return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.float64), kind
    known = array.dtype.kind in "biufc" and array.itemsize <= 8
    try:
        if not known:
            jnp.dtype(kind)  # fails if the name isn't enough to read it again: of text, and of records
        return array if known else array.view(f"u{array.itemsize}"), kind
    except TypeError:
        what = f"{leaf} is more than 64 bits hold" if isinstance(leaf, int) else f"its dtype is {array.dtype}"
        raise CheckpointError(f"checkpoint: {name or 'the leaf'} can't be saved: {what}") from None


def restored(name: str, array: np.ndarray, kind: str, leaf: Any) -> Any:
    """Turns a saved array into what the template's leaf is: on its devices, as a NumPy array, or as a number.

    A Python number and an array of one number can stand for each other, because JAX turns one into the other: a count
    that begins as 0 is int32 after a program.

    Raises:
        CheckpointError: the dtype or shape differs, or a number doesn't fit; one line.
    """
    if is_key(leaf) and kind == _kind(leaf):
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=GENERATORS[str(leaf.dtype)])
        _check_shape(name, keys.shape, leaf.shape)
        return _place(keys, leaf)
    if is_key(leaf) or kind in GENERATORS:
        _check_kind(name, kind, leaf)
    array = array if array.dtype.name == kind else array.view(jnp.dtype(kind))
    array = array.reshape(array.shape[:-1]) if kind == "complex128" else array
    if _is_number(leaf):
        if not _is_alike(array, np.asarray(leaf)):
            _check_kind(name, kind, leaf)
        _check_shape(name, array.shape, ())
        return type(leaf)(array.item())
    if kind in OF_PYTHON and isinstance(leaf, Array | jax.ShapeDtypeStruct) and array.shape == leaf.shape == ():
        array = _cast(name, array, leaf) if _is_alike(array, leaf) else array
    _check_kind(name, array.dtype.name, leaf)
    _check_shape(name, array.shape, np.shape(leaf))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array.copy() if isinstance(leaf, np.ndarray) else array[()]
    return _place(array, leaf)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic)


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether both are bool, both whole numbers, both real or both complex."""
    return any(jnp.issubdtype(one.dtype, kind) and jnp.issubdtype(other.dtype, kind) for kind in KINDS_OF_NUMBERS)


def _cast(name: str, number: np.ndarray, leaf: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = number.astype(leaf.dtype)
    whole = jnp.issubdtype(leaf.dtype, jnp.integer)
    if (int(cast) != int(number)) if whole else (np.isfinite(cast) != np.isfinite(number)):
        raise CheckpointError(
            f"checkpoint: {name} is {number} and the template's is {_kind(leaf)}, which can't hold it"
        )
    return cast


def _check_kind(name: str, found: str, leaf: Any) -> None:
    if found != _kind(leaf):
        raise CheckpointError(f"checkpoint: {name} is {found} and the template's is {_kind(leaf)}")


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(f"checkpoint: {name} has shape {found} and the template's is {wanted}")


def _place(value: Any, leaf: Any) -> Array:
    """Puts a value where the template's leaf is, committed to its devices if the leaf is."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return jnp.asarray(value)
    return placement.place(value, sharding)
