"""Checkpoints of any pytree, for library users: safetensors, JSON and a manifest; nothing in them can execute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, processes
from lockstep.jax_engine.distributed.mesh import Mesh
from lockstep.runs.checkpoint import MANIFEST, CheckpointError, aside_of, pack, problem_with, unpack, write_directory
from lockstep.runs.directory import is_writer

Tree = TypeVar("Tree")

ARRAYS, KINDS = "pytree.safetensors", "kinds.json"
FILES = (ARRAYS, KINDS)
NUMBERS = (bool, int, float, complex)
GENERATORS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def save_checkpoint(dir: str | Path, state: Any, unreplicate: bool = False) -> Path:
    """Saves a pytree; what the directory held before is replaced in one step.

    Leaves that are arrays, numbers or random keys are saved, by their paths. Others (functions, strings) belong to the
    code, and :func:`load_checkpoint` takes them from its template. With several processes every one must call this; one
    writes.

    Args:
        dir: the checkpoint's directory.
        state: any pytree: a train state, an Equinox module, a tuple of dicts.
        unreplicate: drop the leading device axis that ``replicate`` added.

    Returns:
        The directory.

    Raises:
        CheckpointError: it can't be written, or the directory holds something else; what was there is untouched. In
            every process.
    """
    directory = Path(dir)
    arrays: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}
    for name, leaf in _saved_leaves(state).items():
        arrays[name], kinds[name] = _to_host(placement.unreplicate(leaf) if unreplicate else leaf)
    error = _written(directory, arrays, kinds) if is_writer(processes.this_process()) else None
    said = processes.gather_json(None if error is None else str(error))
    if error is not None:
        raise error
    for message in filter(None, said):
        raise CheckpointError(message)
    return directory


def _written(directory: Path, arrays: dict[str, np.ndarray], kinds: dict[str, str]) -> Exception | None:
    """Writes a checkpoint; why it couldn't be, if it couldn't: the other processes wait to hear of it."""
    try:
        is_other = directory.is_file() or (directory.exists() and any(directory.iterdir()))
        if is_other and not (directory / MANIFEST).exists():
            return CheckpointError(f"{directory} holds something else than a checkpoint; name another directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        files = {ARRAYS: pack(arrays), KINDS: (json.dumps(kinds, indent=1) + "\n").encode()}
        write_directory(directory, files, {"kind": "pytree"})
    except Exception as error:
        return error
    return None


def load_checkpoint(dir: str | Path, template: Tree, replicate_to: int | Mesh | None = None) -> Tree:
    """Loads a pytree that :func:`save_checkpoint` saved.

    Args:
        dir: the checkpoint's directory.
        template: a pytree of the same structure, shapes and dtypes: a fresh state, or what ``jax.eval_shape`` gives.
            Arrays go where the template's are, on however many devices; NumPy arrays and numbers stay what they are.
        replicate_to: that many devices, each with a copy along a new leading axis (``replicate``); or a mesh, every
            leaf whole on each of its devices (``replicate_on_mesh``).

    Raises:
        CheckpointError: the directory is missing or damaged, or what it holds doesn't fit the template: the leaf is
            named.
    """
    directory = _valid_directory(Path(dir))
    arrays = unpack((directory / ARRAYS).read_bytes())
    kinds = json.loads((directory / KINDS).read_text())
    wanted = _saved_leaves(template)
    for name in [*wanted, *arrays]:
        if name not in arrays or name not in wanted:
            where = "the checkpoint" if name not in arrays else "the template"
            raise CheckpointError(f"checkpoint {directory}: {name or 'the leaf'} is not in {where}")
    restored = {name: _restore(name, arrays[name], kinds[name], leaf) for name, leaf in wanted.items()}

    def of(path: Any, leaf: Any) -> Any:
        return restored.get(_name(path), leaf) if _is_saved(leaf) else leaf

    tree = jax.tree_util.tree_map_with_path(of, template)
    return tree if replicate_to is None else _spread(tree, replicate_to)


def _spread(tree: Tree, replicate_to: int | Mesh) -> Tree:
    """Gives the tree's arrays on several devices; leaves that aren't arrays or numbers stay as they are."""

    def of(leaf: Any) -> Any:
        if not _is_saved(leaf):
            return leaf
        if isinstance(replicate_to, Mesh):
            return placement.replicate_on_mesh(leaf, replicate_to)
        return placement.replicate(leaf, meshes.make_mesh(num_devices=replicate_to))

    return jax.tree.map(of, tree)


def _valid_directory(directory: Path) -> Path:
    """Gives the directory, or the one that waited aside when a crash came between the two renames."""
    problem = problem_with(directory, FILES)
    if problem is None:
        return directory
    aside = aside_of(directory)
    if not directory.exists() and problem_with(aside, FILES) is None:
        return aside
    raise CheckpointError(problem)


# --- leaves -------------------------------------------------------------------------------------------------------


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_saved(leaf: Any) -> bool:
    return isinstance(leaf, (Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *NUMBERS))


def _saved_leaves(tree: Any) -> dict[str, Any]:
    """Gives the leaves that belong into a checkpoint, by name."""
    named = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _is_saved(leaf)]
    leaves = dict(named)
    if len(leaves) < len(named):
        twice = next(name for name, _ in named if [n for n, _ in named].count(name) > 1)
        raise CheckpointError(f"two leaves of the pytree are named {twice}; rename one")
    return leaves


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf: Any) -> str:
    """Gives a leaf's dtype as the checkpoint states it; of a key, its generator."""
    if _is_key(leaf):
        return str(leaf.dtype)
    return np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype).name


def _to_host(leaf: Any) -> tuple[np.ndarray, str]:
    """Copies a leaf to the host as safetensors know it, with its kind; what they don't know is saved as bits."""
    kind = _kind(leaf)
    array = placement.gathered(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return (array if array.dtype.kind in "biufc" else array.view(f"u{array.itemsize}")), kind


def _restore(name: str, array: np.ndarray, kind: str, leaf: Any) -> Any:
    """Turns a saved array into what the template's leaf is: on its devices, as a NumPy array, or as a number."""
    if kind != _kind(leaf):
        raise CheckpointError(f"checkpoint: {name} is {kind} and the template's is {_kind(leaf)}")
    if _is_key(leaf):
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=GENERATORS[str(leaf.dtype)])
        _check_shape(name, keys.shape, leaf.shape)
        return _place(keys, leaf)
    array = array if array.dtype.name == kind else array.view(jnp.dtype(kind))
    _check_shape(name, array.shape, np.shape(leaf))
    if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic):
        return type(leaf)(array.item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array.copy() if isinstance(leaf, np.ndarray) else array[()]
    return _place(array, leaf)


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(f"checkpoint: {name} has shape {found} and the template's is {wanted}")


def _place(value: Any, leaf: Any) -> Array:
    sharding = getattr(leaf, "sharding", None)
    return jnp.asarray(value) if sharding is None else placement.place(value, sharding)
