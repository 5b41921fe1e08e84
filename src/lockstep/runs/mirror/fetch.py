"""Fetches a run from its mirror to this host's disk, where it can be resumed like any run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lockstep.core.files import write_synced
from lockstep.core.process import say
from lockstep.runs.checkpoint import (
    MANIFEST,
    newer_format,
    parsed_manifest,
    problem_with,
    step_of,
    strange_name,
)
from lockstep.runs.checkpoint_writer import write_directory
from lockstep.runs.directory import CHECKPOINTS, CONFIG, OWN_NAMES, SUMMARY
from lockstep.runs.mirror.place import MirrorError, Place


def steps_on(names: list[str]) -> list[int]:
    """Returns the steps of the checkpoints that are whole among a mirror's files, newest first."""
    found = [n.split("/")[1] for n in names if n.startswith(f"{CHECKPOINTS}/") and n.endswith(f"/{MANIFEST}")]
    return sorted({step for name in found if (step := step_of(Path(name))) is not None}, reverse=True)


def manifests_on(place: Place) -> dict[str, bytes]:
    """Reads the manifests of the checkpoints that are whole on a mirror, by the checkpoint's name.

    Raises:
        MirrorError: the mirror can't be read.
    """
    read = {f"step_{step}": place.read(f"{CHECKPOINTS}/step_{step}/{MANIFEST}") for step in steps_on(place.names())}
    return {name: manifest for name, manifest in read.items() if manifest is not None}


def has_run(names: list[str]) -> bool:
    """Tells whether a mirror's files are a run's."""
    return CONFIG in names or bool(steps_on(names))


def fetch_config(place: Place, directory: Path) -> None:
    """Writes a run's ``config.json`` into a directory.

    Raises:
        MirrorError: there is no such run.
    """
    content = place.read(CONFIG)
    if content is None:
        raise MirrorError(f"resume: there is no run at {place.url}")
    directory.mkdir(parents=True, exist_ok=True)
    write_synced(directory / CONFIG, content)


def fetch_run(place: Place, run: Path) -> int | None:
    """Fetches a run's files into its directory, over existing ones; returns the newest checkpoint's step.

    Logs come before the checkpoints that rely on them, checkpoints from the oldest to the newest, then the config,
    so that an interrupted fetch starts over, and the summary last. Damaged checkpoints are passed over with a warning.

    Returns:
        The step; None if the mirror has no checkpoint.

    Raises:
        MirrorError: there is no such run, none of its checkpoints is valid, a newer version wrote a later one, the
            mirror can't be read, or ``run`` can't be written.
    """
    names = place.names()
    if not has_run(names):
        raise MirrorError(f"resume: there is no run at {place.url}")
    wanted = [name for name in names if _is_ours(name)]
    try:
        run.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            if name not in (CONFIG, SUMMARY) and not name.startswith(f"{CHECKPOINTS}/"):
                _bring(place, name, run)
        newest = None
        for step in reversed(steps_on(names)):
            if _bring_checkpoint(place, step, run):
                newest = step
        if newest is None and steps_on(names):
            raise MirrorError(f"resume: no checkpoint at {place.url} is whole")
        check_none_newer_there(place, newest)  # which would be behind a damaged one
        for name in (CONFIG, SUMMARY):
            if name in wanted:
                _bring(place, name, run)
    except OSError as error:
        raise MirrorError(f"resume: {run} can't be written: {error.strerror or error}") from None
    return newest


def check_none_newer_there(place: Place, brought: int | None = None) -> None:
    """Refuses a run whose newest checkpoint is of a newer version, because a resumed run would remove it there.

    Checkpoints are looked at from the newest to the first readable one, or to the step that was ``brought``.

    Raises:
        MirrorError: one line that names the checkpoint.
    """
    for step in steps_on(place.names()):
        if step == brought:
            return
        name = f"{CHECKPOINTS}/step_{step}"
        content = place.read(f"{name}/{MANIFEST}") or b""
        newer = newer_format(content, f"{place.url}/{name}")
        if newer is not None:
            raise MirrorError(f"resume: {newer}; resume with that lockstep, which reads it")
        if brought is None and parsed_manifest(content) is not None:
            return


def _is_ours(name: str) -> bool:
    """Tells whether a name is that of a run's own file, and doesn't lead out of its directory."""
    parts = name.split("/")
    return parts[0] in OWN_NAMES and not any(not part or part.startswith(".") or "\0" in part for part in parts)


def _bring(place: Place, name: str, run: Path) -> None:
    content = place.read(name)
    if content is None:
        return
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    write_synced(part, content)
    part.replace(path)


def _bring_checkpoint(place: Place, step: int, run: Path) -> bool:
    """Fetches one checkpoint unless it is here already; returns whether it is whole."""
    final, name = run / CHECKPOINTS / f"step_{step}", f"{CHECKPOINTS}/step_{step}"
    text = place.read(f"{name}/{MANIFEST}")
    manifest = parsed_manifest(text or b"")
    if manifest is None:
        return _pass_over(place, name, f"its {MANIFEST} is none")
    if (strange := strange_name(manifest)) is not None:
        return _pass_over(place, name, f"its {MANIFEST} names {strange!r}, which is no file of a checkpoint")
    if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == text and problem_with(final) is None:
        return True
    files: dict[str, bytes] = {}
    for file, digest in manifest["files"].items():
        content = place.read(f"{name}/{file}")
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return _pass_over(place, name, f"{file} is {'missing' if content is None else 'damaged'}")
        files[file] = content
    facts = {key: value for key, value in manifest.items() if key not in ("format", "files")}
    write_directory(final, files, facts)
    return True


def _pass_over(place: Place, name: str, why: str) -> bool:
    say(f"lockstep: warning: {place.url}/{name}: {why}; passed over")
    return False
