"""Names the leaves of environments' states for a checkpoint, and saves what its files don't know as bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lockstep.jax_engine.shards.keys import is_key


def named_leaves(tree: Any, taken: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Returns the leaves by their paths, such as ``state.place``.

    A leaf whose name is among ``taken``, or that of a leaf before it (``{"a.b": x, "a": {"b": y}}``), is marked with
    ``'``.
    """
    names, out = set(taken), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        while name in names:
            name += "'"
        names.add(name)
        out.append((name, leaf))
    return out


def saved_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which a checkpoint holds arrays: their own, or bits if NumPy lacks it (bfloat16)."""
    own = np.dtype(dtype)
    return own if own.isbuiltin == 1 else np.dtype(f"u{own.itemsize}")


def to_saved(array: np.ndarray) -> np.ndarray:
    """Returns an array as a checkpoint holds it; :func:`from_saved` is the reverse."""
    return array.view(saved_dtype(array.dtype))


def from_saved(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns an array of a checkpoint in the dtype of what it is restored to."""
    own = np.dtype(dtype)
    return array if own == array.dtype else array.view(own)


def check_fit(mine: Mapping[str, Any], theirs: Mapping[str, np.ndarray]) -> None:
    """Compares a checkpoint's arrays with the leaves of this environment, both of one shard or of one environment.

    Raises:
        ValueError: a name, shape or dtype differs; one line.
    """
    for name in [*mine, *theirs]:
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or _form(here) != (there.dtype, there.shape):
            raise ValueError(
                f"the checkpoint doesn't fit this environment: {name} is {_shown(there)} there and {_shown(here)} here"
            )


def _form(leaf: Any) -> tuple[np.dtype, tuple[int, ...]]:
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return saved_dtype(leaf.dtype), tuple(leaf.shape)


def _shown(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
