"""Finds and reads checkpoints: directories of safetensors and JSON files, which a manifest lists with their hashes."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as unpack
from safetensors.numpy import save

from lockstep.core.errors import one_line
from lockstep.core.files import is_finite, quoted
from lockstep.core.process import say
from lockstep.runs.links import link_in_words

MANIFEST = "manifest.json"
PYTREE = "pytree"
"""The manifest's ``kind`` in a checkpoint that :mod:`lockstep.jax` saved."""
GROUPS = ("policy", "optimizer", "normalizers")
POLICY, OPTIMIZER, NORMALIZERS = "policy/", "optimizer/", "normalizers/"
"""Prefixes of array names; after the prefix, a parameter has the name that its network gives it."""
STATE = "state.json"
SHARD = "envs/shard_"
STATE_TYPES = {"environment": dict, "global_step": int, "iteration": int}
"""Keys of :data:`STATE` that every reader needs, with their types."""
REQUIRED = (*(f"{group}.safetensors" for group in GROUPS), STATE)
FORMAT = 1
_NAME = re.compile(r"step_(\d+)$")
_PLAIN = re.compile(r"(envs/shard_\d+|[A-Za-z_]\w*)\.(safetensors|json)")
"""Matches the names of a checkpoint's files; none of them leads out of its directory."""


class CheckpointError(ValueError):
    """Raised if a checkpoint can't be written or read; the message is one line that names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        arrays: by name: ``policy/…``, ``optimizer/…`` and ``normalizers/…``.
        env_shards: each shard's environment arrays, by shard and name.
        state: counters and everything else that is stored as JSON.
        path: the directory that it was read from; None if it wasn't read from one.
    """

    arrays: dict[str, np.ndarray]
    env_shards: dict[int, dict[str, np.ndarray]]
    state: dict[str, Any]
    path: Path | None = None


def below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names start with ``prefix``, by their names without it."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def check_names_and_shapes(mine: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    """Raises a one-line ``ValueError`` unless ``theirs``, of a checkpoint, have the names and shapes of ``mine``."""
    here, there = ({name: array.shape for name, array in arrays.items()} for arrays in (mine, theirs))
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the checkpoint doesn't fit this config: {name} is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here"
            )


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialises arrays as safetensors; ``unpack`` is the reverse.

    Raises:
        CheckpointError: ``unpack`` can't read the dtype of one; one line.
    """
    for name, array in arrays.items():
        if np.asarray(array).dtype.isbuiltin == 2:  # a library's: safetensors may write it, and not read it for NumPy
            raise CheckpointError(f"checkpoint: {name} is {array.dtype}, which no checkpoint can hold; save its bits")
    return save({name: np.array(a, order="C") for name, a in arrays.items()})


def to_files(
    arrays: Mapping[str, np.ndarray], env_shards: Mapping[int, bytes], state: Mapping[str, Any]
) -> dict[str, bytes]:
    """Returns a checkpoint's files by relative path; an array's name loses the prefix that its file is named after."""
    files: dict[str, bytes] = {}
    for group in GROUPS:
        members = {k.removeprefix(f"{group}/"): v for k, v in arrays.items() if k.startswith(f"{group}/")}
        files[f"{group}.safetensors"] = pack(members)
    files |= {f"{SHARD}{shard}.safetensors": content for shard, content in env_shards.items()}
    files["state.json"] = (json.dumps(state) + "\n").encode()  # not indented: Python's encoder in C can't
    return files


# --- reading ----------------------------------------------------------------------------------------------------


def manifest_of(path: Path) -> dict[str, Any] | None:
    """Reads a checkpoint's manifest; None if there is none, or if it is malformed or a link."""
    if (path / MANIFEST).is_symlink() or not (path / MANIFEST).is_file():
        return None
    try:
        return parsed_manifest((path / MANIFEST).read_bytes())
    except OSError:
        return None


def parsed_manifest(content: bytes) -> dict[str, Any] | None:
    """Parses the content of a manifest's file; None if it is malformed or of another format."""
    try:
        manifest = json.loads(content)
        files = manifest["files"]
        if not all(isinstance(name, str) and isinstance(digest, str) for name, digest in files.items()):
            return None
        return manifest if manifest["format"] == FORMAT and isinstance(manifest.get("step", 0), int) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def strange_name(manifest: Mapping[str, Any]) -> str | None:
    """Finds a file name in a manifest that no checkpoint has, and that may lead out of it; None if there is none."""
    return next((name for name in manifest["files"] if not _PLAIN.fullmatch(name)), None)


def problem_with(path: Path, required: Iterable[str] = REQUIRED) -> str | None:
    """Says why a directory is not a valid checkpoint; None if every file has the sha256 that the manifest gives."""
    manifest = manifest_of(path)
    if manifest is None:
        return _why_no_manifest(path)
    for name in required:
        if name not in manifest["files"]:
            return f"{path / MANIFEST} doesn't name {name}"
    if (strange := strange_name(manifest)) is not None:
        return f"{path / MANIFEST} names {strange!r}, which is no file of a checkpoint"
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            kind = file.lstat().st_mode
            link = file if stat.S_ISLNK(kind) else file.parent
            if link != path and link.is_symlink():
                return link_in_words(link)
            if not stat.S_ISREG(kind):
                return f"{file} is no file"
            actual = hashlib.sha256(file.read_bytes()).hexdigest()
        except (OSError, ValueError):
            return f"{file} is missing"
        if actual != expected:
            return f"{path / name} is damaged (its sha256 is not the manifest's)"
    return None


def _why_no_manifest(path: Path) -> str:
    """Says why :func:`manifest_of` finds no manifest: it is a link, of a newer version, or not valid."""
    file = path / MANIFEST
    if file.is_symlink():
        return link_in_words(file)
    return written_by_newer(path) or f"{path} has no valid {MANIFEST}"


def written_by_newer(path: Path) -> str | None:
    """Says that a newer version wrote a checkpoint directory, in a format unknown here; None if none did."""
    file = path / MANIFEST
    try:
        return newer_format(file.read_bytes(), str(path)) if file.is_file() and not file.is_symlink() else None
    except OSError:
        return None


def newer_format(content: bytes, where: str) -> str | None:
    """Says, as :func:`written_by_newer`, that a manifest's content is of a newer version; ``where`` names it."""
    try:
        found = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(found, int) or found <= FORMAT:
        return None
    return f"{where} was written by a newer lockstep (format {found}; this one reads up to {FORMAT})"


def check_none_newer(directory: Path, found: Path) -> None:
    """Refuses to resume from ``found`` if a newer version wrote a later checkpoint, which resuming would remove.

    Raises:
        CheckpointError: one line that names the newest such checkpoint, and what would work.
    """
    for path in checkpoints_in(directory):
        if path.name == found.name:
            return
        if (newer := written_by_newer(path)) is not None:
            raise CheckpointError(
                f"resume: {newer}, and going on from {found.name} would remove it; resume with that lockstep, or give "
                f"--resume {quoted(found)} to go on from there all the same"
            )


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint directory; raises a ``CheckpointError`` that names the file that is missing or damaged."""
    problem = problem_with(path)
    if problem:
        raise CheckpointError(problem)
    named = [name for name in (manifest_of(path) or {"files": {}})["files"] if name.startswith(SHARD)]
    try:
        files = {name: (path / name).read_bytes() for name in (*REQUIRED, *named)}
    except OSError as error:  # a run that is being written has pruned it meanwhile
        raise CheckpointError(f"{error.filename or path} can't be read: {error.strerror or error}") from None
    return replace(checkpoint_of(files, str(path)), path=path)


def checkpoint_of(files: Mapping[str, bytes], where: str) -> Checkpoint:
    """Parses the contents of a checkpoint's files: the reverse of :func:`to_files`.

    Raises:
        CheckpointError: they are not a checkpoint's; the message names ``where``.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        for group in GROUPS:
            arrays |= {f"{group}/{name}": a for name, a in unpack(files[f"{group}.safetensors"]).items()}
        shards = {int(Path(n).stem.removeprefix("shard_")): unpack(files[n]) for n in files if n.startswith(SHARD)}
        state = json.loads(files[STATE])
    except (SafetensorError, KeyError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{where} holds what no checkpoint holds: {one_line(error)}") from None
    return Checkpoint(arrays, shards, state)


def find_training_state(directory: Path, which: str = "latest", warn: bool = True) -> Checkpoint:
    """Reads a run's checkpoint as :func:`find_checkpoint` does; raises a ``CheckpointError`` if no run wrote it."""
    found = find_checkpoint(directory, which, warn)
    for key, kind in STATE_TYPES.items():
        value = found.state.get(key) if isinstance(found.state, dict) else None
        if value is None:
            raise CheckpointError(f"{found.path}: {STATE} lacks {key}; it isn't a run's")
        if not isinstance(value, kind):
            raise CheckpointError(f"{found.path}: {key} of {STATE} is {value!r}; it isn't a run's")
    return found


def newest_manifest(directory: Path) -> dict[str, Any] | None:
    """Reads the newest valid manifest among a run's checkpoints; None if there is none."""
    return next((found for path in checkpoints_in(directory) if (found := manifest_of(path)) is not None), None)


def step_of(path: Path) -> int | None:
    """Returns the global step in a checkpoint directory's name; None if the name has none."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Lists checkpoint directories, valid or not, newest first."""
    found = [p for p in directory.glob("step_*") if p.is_dir() and not p.is_symlink() and step_of(p) is not None]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


Score = tuple[bool, bool, float]
"""Whether the score is an evaluation's, whether the config asked for the checkpoint at that time, and the score."""


def score_in(manifest: Mapping[str, Any] | None) -> Score | None:
    """Returns a manifest's score, of an evaluation or of the last episodes; None if it is no finite number."""
    found = manifest or {}
    score = found.get("score")
    if not is_finite(score):
        return None
    return _was_evaluated(found), found.get("planned") is not False, score


def _was_evaluated(manifest: Mapping[str, Any]) -> bool:
    """Tells whether a score is an evaluation's; in versions that didn't record it, it was if the config evaluates."""
    if "evaluated" in manifest:
        return manifest["evaluated"] is True
    config = manifest.get("config")
    section = config.get("eval") if isinstance(config, dict) else None
    interval = section.get("interval") if isinstance(section, dict) else None
    return isinstance(interval, int) and interval > 0


def best_of(directory: Path) -> Path | None:
    """Returns the checkpoint with the highest score, the newest among equals; None if none has a score.

    Training returns count only if no checkpoint was evaluated: the two aren't comparable, and a resumed run may start
    or stop evaluating. A checkpoint that was saved because a session ended, or by the clock, counts only if no planned
    one of its kind has a score: so the best one depends on the config alone.
    """
    return best_among({path: score_in(manifest_of(path)) for path in checkpoints_in(directory)})


def best_among(scores: Mapping[Path, Score | None]) -> Path | None:
    """Returns the checkpoint with the highest score, the newest among equals; None if none has a score."""
    scored = [(score, step_of(path) or 0, path) for path, score in scores.items() if score is not None]
    return max(scored)[2] if scored else None


def find_checkpoint(directory: Path, which: str = "latest", warn: bool = True) -> Checkpoint:
    """Reads a run's checkpoint: ``latest``, ``best``, or that of a step number.

    ``latest`` passes over checkpoints that are damaged or of a newer version, with a warning, and takes the newest
    valid one. ``best`` passes over those of a newer version, with a warning.

    Raises:
        CheckpointError: there is no such checkpoint, or the one asked for is damaged.
    """
    if which == "best":
        best = best_of(directory)
        if best is None:
            held = checkpoints_in(directory)
            strange = next((p for p in held if (p / MANIFEST).is_symlink() or written_by_newer(p)), None)
            none = f"{directory} holds no checkpoint with a return to be best by"
            raise CheckpointError(none if strange is None else _why_no_manifest(strange))
        unread = map(written_by_newer, checkpoints_in(directory))
        for newer in filter(None, unread) if warn else ():
            say(f"lockstep: warning: {newer}; whether it is the best isn't known, {best.name} is taken")
        try:
            return read_checkpoint(best)
        except CheckpointError:
            if best_of(directory) in (best, None):
                raise
            return find_checkpoint(directory, which, warn)  # a better one has taken its place
    if which != "latest":
        path = directory / f"step_{which.removeprefix('step_')}"
        if not path.is_dir():
            steps = ", ".join(str(step_of(p)) for p in checkpoints_in(directory)) or "none"
            raise CheckpointError(f"{directory} holds no checkpoint of step {which}; there are: {steps}")
        return read_checkpoint(path)
    problems: dict[Path, str] = {}
    while path := next((p for p in checkpoints_in(directory) if p not in problems), None):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            problems[path] = str(error)
        else:
            for passed, problem in problems.items() if warn else ():
                if passed.is_dir():  # else a run that is being written has gone on, and pruned it
                    say(f"lockstep: warning: {problem}; passed over for {path.name}")
            return checkpoint
    if not problems:
        raise CheckpointError(f"{directory} holds no checkpoint to resume from or load")
    newer = any(map(written_by_newer, checkpoints_in(directory)))
    raise CheckpointError("; ".join(problems.values()) + ("; use that lockstep" if newer else ""))
