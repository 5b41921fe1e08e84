"""Saves and loads checkpoints of any pytree as safetensors, JSON and a manifest; nothing in them can execute."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from lockstep.jax.checkpoints.leaves import is_saved, name_of, restored, saved_leaves, to_host
from lockstep.jax.config import whole_number
from lockstep.jax.settings import SettingError
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, processes
from lockstep.jax_engine.distributed.mesh import Mesh
from lockstep.runs.checkpoint import (
    MANIFEST,
    PYTREE,
    CheckpointError,
    checkpoints_in,
    pack,
    problem_with,
    step_of,
    unpack,
)
from lockstep.runs.checkpoint_writer import aside_of, write_directory
from lockstep.runs.directory import LOCK, is_writer

Tree = TypeVar("Tree")

ARRAYS, KINDS = "pytree.safetensors", "kinds.json"
FILES = (ARRAYS, KINDS)
PARTS = "left_out_of_checkpoints"
"""Attribute of a class that lists parts which may be missing from a template or a checkpoint."""
UNFINISHED = re.compile(r"\.step_\d+\.")
"""Matches the beginning of the names of files that a killed process leaves of a checkpoint."""


def save_checkpoint(
    dir: str | Path,
    state: Any,
    unreplicate: bool = False,
    *,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Saves a pytree; replaces an earlier checkpoint in the directory in one step, and keeps other files there.

    Leaves that are arrays, numbers or random keys are saved, named by their paths. Other leaves (functions, strings)
    belong to the code; :func:`load_checkpoint` takes them from its template. With several processes every process must
    call this; one of them writes.

    Args:
        dir: the checkpoint's directory.
        state: any pytree: a train state, an Equinox module, a tuple of dicts.
        unreplicate: drop the leading device axis that ``replicate`` added.
        step: save it as ``step_<step>`` in the directory.
        metadata: further data to keep, as JSON; :func:`load_metadata` reads it.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it can't be written, or the directory holds something else; what was there is untouched. Every
            process raises it.
        ValueError: ``step`` isn't a whole number, ``unreplicate`` isn't a bool, or ``metadata`` isn't JSON; one line.
    """
    if not isinstance(unreplicate, bool | np.bool_):
        raise SettingError(
            f"unreplicate: {unreplicate!r} was given, and it is True or False; give a step by name, "
            f"step={unreplicate if isinstance(unreplicate, int | np.integer) else 4}"
        )
    directory, said_of_it = _directory(dir, step), _metadata(metadata)
    arrays: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}
    for name, leaf in saved_leaves(state).items():
        arrays[name], kinds[name] = to_host(name, placement.unreplicate(leaf) if unreplicate else leaf)
    error = _written(directory, arrays, kinds, said_of_it) if is_writer(processes.this_process()) else None
    said = processes.gather_json(None if error is None else str(error))
    if error is not None:
        raise error
    for message in filter(None, said):
        raise CheckpointError(message)
    return directory


def _directory(dir: str | Path, step: int | None) -> Path:
    if not isinstance(dir, str | os.PathLike):
        raise ValueError(f"checkpoint: {dir!r} is no path of a directory")
    return Path(dir) if step is None else Path(dir) / f"step_{whole_number('step', step, 0)}"


def _metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    try:
        return {"metadata": json.loads(json.dumps(dict(metadata)))}
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata: it is saved as JSON, which this isn't: {str(error).splitlines()[0]}") from None


def _written(
    directory: Path, arrays: dict[str, np.ndarray], kinds: dict[str, str], facts: dict[str, Any]
) -> Exception | None:
    """Writes a checkpoint; returns the error if it can't, because the other processes wait to hear of it."""
    try:
        recover(directory)
        if directory.is_file() or (directory.exists() and not _may_be_replaced(directory)):
            return CheckpointError(f"{directory} holds something else than a checkpoint; name another directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        files = {ARRAYS: pack(arrays), KINDS: (json.dumps(kinds, indent=1) + "\n").encode()}
        write_directory(directory, files, {"kind": PYTREE, **facts}, others_in(directory))
    except Exception as error:
        return error
    return None


def others_in(directory: Path) -> list[str]:
    """Lists what a directory holds beside the files of its own checkpoint: other checkpoints, notes."""
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    return [name for name in found if name not in (*FILES, MANIFEST)]


def _may_be_replaced(directory: Path) -> bool:
    """Returns whether a directory is a checkpoint, or holds only checkpoints of steps or files of a damaged one."""
    others = [directory / name for name in others_in(directory) if name != LOCK and not UNFINISHED.match(name)]
    nested = all((path / MANIFEST).is_file() and step_of(path) is not None for path in others)
    damaged = any((directory / name).exists() for name in FILES)
    return (directory / MANIFEST).exists() or (nested and not damaged) or not others


def recover(directory: Path) -> None:
    """Restores what a crash between two renames left aside: the checkpoint, or others that were nested in it."""
    aside = aside_of(directory)
    if not aside.is_dir():
        return
    if not directory.exists():
        aside.rename(directory)
        return
    for name in others_in(aside):
        if not (directory / name).exists():
            (aside / name).rename(directory / name)


def load_checkpoint(
    dir: str | Path,
    template: Tree | None = None,
    replicate_to: int | Mesh | None = None,
    *,
    like: Tree | None = None,
    step: int | None = None,
) -> Tree:
    """Loads a pytree that :func:`save_checkpoint` saved.

    Args:
        dir: the checkpoint's directory.
        template: a pytree of the same structure, shapes and dtypes: a fresh state, or the result of ``jax.eval_shape``.
            Arrays are placed as the template's are, on any number of devices; NumPy arrays and numbers remain such. A
            Python number and an array of one number of the same kind (integer, real) can stand for each other. If the
            template is a train state without environments (``PPO.init``, ``agent_state``), the agent alone is loaded.
        replicate_to: a number of devices, each of which gets a copy along a new leading axis (``replicate``); or a
            mesh, whose devices each get every leaf whole (``replicate_on_mesh``).
        like: another name for ``template``.
        step: load ``step_<step>`` in the directory.

    Raises:
        CheckpointError: the directory is missing or damaged, or a leaf, which is named, doesn't fit the template.
        ValueError: there is no template, or there are two; one line.
    """
    if (template is None) == (like is None):
        raise ValueError("load_checkpoint: give a template of the same structure, as the second argument or as like=")
    directory = _valid_directory(_directory(dir, step))
    with jax.transfer_guard("allow"):  # a caller who guards a loop of steps may load in it
        tree = _loaded(directory, template if like is None else like)
        return tree if replicate_to is None else _spread(tree, replicate_to)


def load_metadata(dir: str | Path, *, step: int | None = None) -> dict[str, Any] | None:
    """Returns the ``metadata`` of a checkpoint; None if it was saved without.

    Raises:
        CheckpointError: the directory is missing or damaged.
    """
    directory = _valid_directory(_directory(dir, step))
    return json.loads((directory / MANIFEST).read_text()).get("metadata")


def _loaded(directory: Path, template: Any) -> Any:
    arrays = unpack((directory / ARRAYS).read_bytes())
    kinds = json.loads((directory / KINDS).read_text())
    template, spare = _fitted(template, arrays)
    wanted = saved_leaves(template)
    for name in [*wanted, *arrays]:
        if name not in arrays or (name not in wanted and not _is_in(name, spare)):
            where = "the checkpoint" if name not in arrays else "the template"
            raise CheckpointError(f"checkpoint {directory}: {name or 'the leaf'} is not in {where}")
    leaves = {name: restored(name, arrays[name], kinds[name], leaf) for name, leaf in wanted.items()}

    def of(path: Any, leaf: Any) -> Any:
        return leaves.get(name_of(path), leaf) if is_saved(leaf) else leaf

    return jax.tree_util.tree_map_with_path(of, template)


def _is_in(name: str, parts: Sequence[str]) -> bool:
    """Returns whether a leaf is one of these parts, or in one of them."""
    return any(name == part or name.startswith(f"{part}/") for part in parts)


def _fitted(template: Any, arrays: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Removes parts of train states that the checkpoint lacks from a template; lists those that only it has."""
    spare: list[str] = []

    def has_parts(node: Any) -> bool:
        return hasattr(type(node), PARTS)

    def of(path: Any, node: Any) -> Any:
        if not has_parts(node):
            return node
        for part in getattr(node, PARTS):
            name = "/".join(filter(None, (name_of(path), part)))
            there = any(_is_in(key, [name]) for key in arrays)
            if getattr(node, part) is None and there:
                spare.append(name)
            elif getattr(node, part) is not None and not there:
                node = node.replace(**{part: None})
        return node

    return jax.tree_util.tree_map_with_path(of, template, is_leaf=has_parts), spare


def _spread(tree: Tree, replicate_to: int | Mesh) -> Tree:
    """Copies the tree's arrays to several devices; leaves that aren't arrays or numbers stay as they are."""

    def of(leaf: Any) -> Any:
        if not is_saved(leaf):
            return leaf
        if isinstance(replicate_to, Mesh):
            return placement.replicate_on_mesh(leaf, replicate_to)
        return placement.replicate(leaf, meshes.make_mesh(num_devices=replicate_to))

    return jax.tree.map(of, tree)


def _valid_directory(directory: Path) -> Path:
    """Returns the directory, or the one that was left aside if a crash came between the two renames."""
    problem = problem_with(directory, FILES)
    if problem is None:
        return directory
    aside = (aside_of(directory), aside_of(directory.parent) / directory.name)
    for path in aside:
        if not directory.exists() and problem_with(path, FILES) is None:
            return path
    raise CheckpointError(_steps_instead(directory) or problem)


def _steps_instead(directory: Path) -> str | None:
    """Returns a message with the steps that have checkpoints if a directory without one was asked for; else None."""
    if (directory / MANIFEST).exists():
        return None
    missing = not directory.exists() and step_of(directory) is not None
    folder = directory.parent if missing else directory
    steps = [step_of(path) for path in checkpoints_in(folder)]
    if not steps:
        return None
    what = f"none of step {step_of(directory)}" if missing else "none of its own"
    shown = f"{', '.join(map(str, steps[:5]))}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"
    return f"checkpoint: {folder} holds {what}, but of steps {shown}; give step={steps[0]}"
