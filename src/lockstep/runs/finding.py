"""Finds runs by name, by path or by one of their checkpoints, and tells whether a directory is a run."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.core.process import say
from lockstep.runs.checkpoint import PYTREE, checkpoints_in, manifest_of, newest_manifest
from lockstep.runs.directory import CHECKPOINTS, CONFIG, SEED


def check_single(path: Path) -> None:
    """Raises a one-line ``ValueError`` if a directory holds a group of seeds instead of a single run."""
    if seeds := seeds_in(path):
        raise ValueError(f"run: {path} holds a run for each of {len(seeds)} seeds; give one of them, e.g. {seeds[0]}")


def find_run(run: str, runs_dir: str = "runs", single: bool = True) -> tuple[Path, str]:
    """Finds the run that a name, a path or the path of one of its checkpoints means.

    Returns:
        The run's directory, and the checkpoint's name: ``latest`` unless the path names one.

    Raises:
        ValueError: there is no such run, or a ``single`` one is asked for and it is a group; the line says what there
            is.
    """
    found = run_if_any(run, runs_dir, single)
    if found is not None:
        return found
    places = _places_of(run, runs_dir)
    for path in places:
        if path.parent.name == CHECKPOINTS and is_run(path.parent.parent):
            names = ", ".join(each.name for each in checkpoints_in(path.parent)) or "none"
            raise ValueError(f"run: {path.parent.parent} has no checkpoint {path.name}; it has {names}")
    there = sorted(p.parent.name for p in Path(os.path.expanduser(runs_dir)).glob(f"*/{CONFIG}") if is_run(p.parent))
    close = difflib.get_close_matches(run, there, 1, 0.6)
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    listed = f"; in {runs_dir} there are: {', '.join(there[:5])}{more}" if there else f"; {runs_dir} holds no runs"
    listed = f"; did you mean {close[0]}?" if close else listed
    neither = f"neither {run} nor {places[1]} is a run directory" if places[1:] else f"{run} is no run directory"
    raise ValueError(f"run: {neither}{listed}")


def run_if_any(run: str, runs_dir: str = "runs", single: bool = True) -> tuple[Path, str] | None:
    """Finds a run as :func:`find_run` does; None if there is no such run.

    Raises:
        ValueError: a ``single`` run is asked for and it is a group, or it is a checkpoint outside a run; one line.
    """
    places = _places_of(run, runs_dir)
    for number, path in enumerate(places):
        if (which := _checkpoint_meant(path)) is None:
            continue
        if which == "latest":
            path = with_name(path)
            _say_which(run, path, places[number + 1 :])
            if single:
                check_single(path)
            return path, which
        return with_name(path.parent.parent), which
    for path in places:
        if path.is_dir() and (manifest_of(path) or newest_manifest(path) or {}).get("kind") == PYTREE:
            raise ValueError(
                f"run: {path} holds a checkpoint of lockstep.jax, which is no run's; load it with "
                "lockstep.jax.load_checkpoint"
            )
    return None


def _places_of(run: str, runs_dir: str) -> list[Path]:
    given, place = map(os.path.expanduser, (run, runs_dir))
    return list(dict.fromkeys((Path(given), Path(place) / given)))


def _checkpoint_meant(path: Path) -> str | None:
    """Returns the checkpoint that a path names, ``latest`` if the path is a run; None if it is neither."""
    if is_run(path):
        return "latest"
    inside = path.parent.name == CHECKPOINTS and is_run(path.parent.parent) and path.is_dir()
    return path.name if inside else None


@functools.cache
def _say_once(text: str) -> None:
    say(text)


def _say_which(run: str, taken: Path, others: Sequence[Path]) -> None:
    """Says, once per process, which run is taken if ``run`` is a path as well as a name in ``runs_dir``."""
    for other in others:
        with contextlib.suppress(OSError):  # a run that can't be read isn't the one meant
            if is_run(other) and not other.samefile(taken):
                _say_once(
                    f"lockstep: {run} is a run's path and a run's name in {other.parent}; {taken.absolute()} is taken"
                )


def with_name(path: Path) -> Path:
    """Returns a run's directory as a path that ends in its name, even if it was given as ``.`` or ``..``."""
    return path.resolve() if path.name in ("", "..") else path


def is_run(path: Path) -> bool:
    """Tells whether a directory is a run's: it has a config, even a torn one, or a checkpoint that keeps one.

    A ``config.json`` of another program, such as a model's, doesn't count.
    """
    if "config" in (newest_manifest(path / CHECKPOINTS) or {}):
        return True
    if not (path / CONFIG).is_file():
        return False
    try:
        found = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(found, dict) or isinstance(found.get("env"), dict)


def seeds_in(path: Path) -> list[Path]:
    """Lists the runs of a group, in the order of their seeds."""
    found = {p.parent.name.removeprefix(SEED): p.parent for p in path.glob(f"{SEED}*/{CONFIG}")}
    return [found[seed] for seed in sorted(filter(str.isdecimal, found), key=int)]


def checkpoints_of(run: Path) -> list[Path]:
    """Lists a run's checkpoints, newest first; none if their directory is a link, which may lead to another run's."""
    directory = run / CHECKPOINTS
    return [] if directory.is_symlink() else checkpoints_in(directory)
