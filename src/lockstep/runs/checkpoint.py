"""Writes checkpoints, safetensors and JSON, in the background; commits them by a rename, checks them by a manifest."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as unpack
from safetensors.numpy import save

from lockstep.core.files import sync_path, write_synced
from lockstep.core.life import life

MANIFEST = "manifest.json"
PYTREE = "pytree"
"""Kind, in the manifest, of a checkpoint that :mod:`lockstep.jax` saved."""
GROUPS = ("policy", "optimizer", "normalizers")
POLICY = "policy/"
"""Begins the names of parameters; what follows is the name that the network gives them."""
STATE = "state.json"
STATE_TYPES = {"environment": dict, "global_step": int, "iteration": int}
"""What everybody reads in it."""
REQUIRED = (*(f"{group}.safetensors" for group in GROUPS), STATE)
FORMAT = 1
_NAME = re.compile(r"step_(\d+)$")
_PLAIN = re.compile(r"(envs/shard_\d+|[A-Za-z_]\w*)\.(safetensors|json)")
"""Names of files in a checkpoint: none leads out of it."""


class CheckpointError(ValueError):
    """A checkpoint can't be written or read; the message is one line that names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, and where it was read from.

    ``arrays`` are ``policy/…``, ``optimizer/…`` and ``normalizers/…`` by name, ``env_shards`` each shard's environment
    arrays, ``state`` counters and whatever else is JSON.
    """

    arrays: dict[str, np.ndarray]
    env_shards: dict[int, dict[str, np.ndarray]]
    state: dict[str, Any]
    path: Path | None = None


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as safetensors bytes; ``unpack`` is the reverse."""
    return save({name: np.array(a, order="C") for name, a in arrays.items()})


def to_files(
    arrays: Mapping[str, np.ndarray], env_shards: Mapping[int, bytes], state: Mapping[str, Any]
) -> dict[str, bytes]:
    """A checkpoint's files by relative path; array names lose the prefix that their file's name says."""
    files: dict[str, bytes] = {}
    for group in GROUPS:
        members = {k.removeprefix(f"{group}/"): v for k, v in arrays.items() if k.startswith(f"{group}/")}
        files[f"{group}.safetensors"] = pack(members)
    files |= {f"envs/shard_{shard}.safetensors": content for shard, content in env_shards.items()}
    files["state.json"] = (json.dumps(state, indent=1) + "\n").encode()
    return files


# --- reading ----------------------------------------------------------------------------------------------------


def manifest_of(path: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest, or None if it hasn't the shape of one."""
    if (path / MANIFEST).is_symlink() or not (path / MANIFEST).is_file():
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if not all(isinstance(name, str) and isinstance(digest, str) for name, digest in files.items()):
            return None
        return manifest if manifest["format"] == FORMAT and isinstance(manifest.get("step", 0), int) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def problem_with(path: Path, required: Iterable[str] = REQUIRED) -> str | None:
    """Finds why a directory is not a valid checkpoint, or None if it is: every file of the manifest, byte for byte."""
    manifest = manifest_of(path)
    if manifest is None:
        return f"{path} has no valid {MANIFEST}"
    for name in required:
        if name not in manifest["files"]:
            return f"{path / MANIFEST} doesn't name {name}"
    for name, expected in manifest["files"].items():
        if not _PLAIN.fullmatch(name):
            return f"{path / MANIFEST} names {name!r}, which is no file of a checkpoint"
        if (path / name).is_symlink() or ((path / name).parent.is_symlink() and (path / name).parent != path):
            return f"{path / name} is a link, which no checkpoint holds"
        if (path / name).exists() and not (path / name).is_file():
            return f"{path / name} is no file"
        try:
            actual = hashlib.sha256((path / name).read_bytes()).hexdigest()
        except (OSError, ValueError):
            return f"{path / name} is missing"
        if actual != expected:
            return f"{path / name} is damaged (its sha256 is not the manifest's)"
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint directory; a ``CheckpointError`` names the file that is missing or damaged."""
    problem = problem_with(path)
    if problem:
        raise CheckpointError(problem)
    arrays: dict[str, np.ndarray] = {}
    named = [name for name in (manifest_of(path) or {"files": {}})["files"] if name.startswith("envs/shard_")]
    try:
        for group in GROUPS:
            members = unpack((path / f"{group}.safetensors").read_bytes())
            arrays |= {f"{group}/{name}": a for name, a in members.items()}
        shards = {int(Path(n).stem.removeprefix("shard_")): unpack((path / n).read_bytes()) for n in named}
        state = json.loads((path / STATE).read_text())
    except (SafetensorError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} holds what no checkpoint holds: {' '.join(str(error).split())}") from None
    return Checkpoint(arrays, shards, state, path)


def find_training_state(directory: Path, which: str = "latest", warn: bool = True) -> Checkpoint:
    """Reads a run's checkpoint as :func:`find_checkpoint`, and makes sure that training wrote it."""
    found = find_checkpoint(directory, which, warn)
    for key, kind in STATE_TYPES.items():
        value = found.state.get(key) if isinstance(found.state, dict) else None
        if value is None:
            raise CheckpointError(f"{found.path}: {STATE} lacks {key}; it isn't a run's")
        if not isinstance(value, kind):
            raise CheckpointError(f"{found.path}: {key} of {STATE} is {value!r}; it isn't a run's")
    return found


def newest_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a run's newest checkpoint that has one; None without any."""
    return next((found for path in checkpoints_in(directory) if (found := manifest_of(path)) is not None), None)


def step_of(path: Path) -> int | None:
    """Global step of a checkpoint directory, by its name."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Checkpoint directories, newest first, valid or not."""
    found = [p for p in directory.glob("step_*") if p.is_dir() and not p.is_symlink() and step_of(p) is not None]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


def _score(path: Path) -> float | None:
    score = (manifest_of(path) or {}).get("score")
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def best_of(directory: Path) -> Path | None:
    """The checkpoint with the highest score, the newest among equals."""
    scored = [(score, step_of(p) or 0, p) for p in checkpoints_in(directory) if (score := _score(p)) is not None]
    return max(scored)[2] if scored else None


def find_checkpoint(directory: Path, which: str = "latest", warn: bool = True) -> Checkpoint:
    """Read a run's checkpoint: ``latest``, ``best``, or a step number.

    A damaged one is passed over, with a warning, for the newest valid one before it.

    Raises:
        CheckpointError: there is none.
    """
    if which == "best":
        best = best_of(directory)
        if best is None:
            raise CheckpointError(f"{directory} holds no checkpoint with a return to be best by")
        return read_checkpoint(best)
    if which != "latest":
        path = directory / f"step_{which.removeprefix('step_')}"
        if not path.is_dir():
            steps = ", ".join(str(step_of(p)) for p in checkpoints_in(directory)) or "none"
            raise CheckpointError(f"{directory} holds no checkpoint of step {which}; there are: {steps}")
        return read_checkpoint(path)
    problems = []
    for path in checkpoints_in(directory):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            problem = str(error)
        else:
            for passed in problems if warn else ():
                print(f"lockstep: warning: {passed}; passed over for {path.name}", file=sys.stderr)
            return checkpoint
        problems.append(problem)
    raise CheckpointError(
        "; ".join(problems) if problems else f"{directory} holds no checkpoint to resume from or load"
    )


# --- writing ----------------------------------------------------------------------------------------------------


def commit(
    directory: Path, step: int, files: Mapping[str, bytes], score: float | None, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write a run's checkpoint, unless it is there already; see :func:`write_directory`."""
    final = directory / f"step_{step}"
    if not final.exists() or problem_with(final) is not None:
        write_directory(final, files, {"step": step, "score": score, **(facts or {})})
    return final


def aside_of(final: Path) -> Path:
    """Names where a directory waits while its successor takes its place; a crash at that moment leaves it there."""
    return final.parent / f".{final.name}.old"


def write_directory(
    final: Path, files: Mapping[str, bytes], facts: Mapping[str, Any], keep: Iterable[str] = ()
) -> None:
    """Write files and their manifest so that they are there whole or not at all: temporary directory, fsync, rename.

    A directory that is there is replaced, but for what ``keep`` names in it. ``facts`` is what else the manifest says.

    Raises:
        CheckpointError: it can't be written; what was there is untouched.
    """
    temporary = final.parent / f".{final.name}.{os.getpid()}.tmp"
    try:
        if temporary.is_symlink():
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # not one that somebody else has made
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            write_synced(temporary / name, content)
            life.progressed()
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format": FORMAT, **facts, "files": hashes}
        write_synced(temporary / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for folder in {(temporary / name).parent for name in files} | {temporary}:
            sync_path(folder)
        aside = aside_of(final)
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            next(final.iterdir(), None)  # a file in the way is an error, not replaced
            final.rename(aside)
        temporary.rename(final)
        for name in keep:
            (aside / name).rename(final / name)
        sync_path(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CheckpointError(
            f"checkpoint {final} can't be written: {why}; earlier checkpoints are untouched"
        ) from None


def prune(directory: Path, keep_last: int, keep_best: bool) -> None:
    """Remove all but the newest ``keep_last`` valid checkpoints and the best one; damaged ones take no place."""
    valid = (path for path in checkpoints_in(directory) if problem_with(path) is None)
    keep = {*itertools.islice(valid, keep_last), best_of(directory) if keep_best else None}
    for path in checkpoints_in(directory):
        if path not in keep and manifest_of(path) is not None:
            shutil.rmtree(path, ignore_errors=True)


def _sync_record(path: Path) -> None:
    try:
        sync_path(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error.strerror or error}; the run counts on it") from None


class CheckpointWriter:
    """Commits checkpoints in a background thread, one at a time; a failure is raised at the next call.

    Without a directory, on a rank that writes nothing, they are dropped. ``keep_last`` newest ones stay, and the best.
    ``records`` are files whose lines a checkpoint counts on: they are on the disk before it is.

    Attributes:
        seconds: of a processor that the last one took in the background.
    """

    def __init__(self, directory: Path | None, keep_last: int, keep_best: bool, records: Sequence[Path] = ()) -> None:
        self._directory, self._keep_last, self._keep_best, self._records = directory, keep_last, keep_best, records
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        for leftover in directory.glob(".step_*.tmp") if directory is not None else ():
            shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self, step: int, files: Mapping[str, bytes], score: float | None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Commit a checkpoint in the background, once the one before it is done; ``facts`` go into its manifest."""
        self.wait()
        if self._directory is None:
            return
        arguments = (self._directory, step, files, score, facts)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint-writer")
        self._thread.start()

    def _run(self, directory: Path, *checkpoint: Any) -> None:
        try:
            for record in self._records:
                _sync_record(record)
            commit(directory, *checkpoint)
            prune(directory, self._keep_last, self._keep_best)
        except BaseException as error:
            self._error = error
        self.seconds = time.thread_time()

    def wait(self) -> None:
        """Wait for the checkpoint under way; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
