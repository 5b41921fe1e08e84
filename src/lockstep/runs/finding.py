"""Finds runs: by name, by path, by one of their checkpoints; and tells what is one."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.core.process import say
from lockstep.runs.checkpoint import PYTREE, manifest_of, newest_manifest
from lockstep.runs.directory import CHECKPOINTS, CONFIG, SEED


def check_single(path: Path) -> None:
    """Raise a one-line ``ValueError`` if a run's directory holds not one run but one a seed."""
    if seeds := seeds_in(path):
        raise ValueError(f"run: {path} holds a run for each of {len(seeds)} seeds; give one of them, e.g. {seeds[0]}")


def find_run(run: str, runs_dir: str = "runs", single: bool = True) -> tuple[Path, str]:
    """The directory of a run given by name, path, or path of one of its checkpoints, and which checkpoint is meant.

    Raises:
        ValueError: there is no such run, or not a ``single`` one but one a seed; the line names those that are there.
    """
    found = run_if_any(run, runs_dir, single)
    if found is not None:
        return found
    places = _places_of(run, runs_dir)
    there = sorted(p.parent.name for p in Path(os.path.expanduser(runs_dir)).glob(f"*/{CONFIG}") if is_run(p.parent))
    close = difflib.get_close_matches(run, there, 1, 0.6)
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    listed = f"; in {runs_dir} there are: {', '.join(there[:5])}{more}" if there else f"; {runs_dir} holds no runs"
    listed = f"; did you mean {close[0]}?" if close else listed
    neither = f"neither {run} nor {places[1]} is a run directory" if places[1:] else f"{run} is no run directory"
    raise ValueError(f"run: {neither}{listed}")


def run_if_any(run: str, runs_dir: str = "runs", single: bool = True) -> tuple[Path, str] | None:
    """What :func:`find_run` finds, or None where there is no such run.

    Raises:
        ValueError: it is not a ``single`` run but one a seed, or a checkpoint of no run; one line.
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
    """Which checkpoint of a run a path is, ``latest`` where it is the run itself; None: it is neither."""
    if is_run(path):
        return "latest"
    inside = path.parent.name == CHECKPOINTS and is_run(path.parent.parent) and path.is_dir()
    return path.name if inside else None


@functools.cache
def _say_once(text: str) -> None:
    say(text)


def _say_which(run: str, taken: Path, others: Sequence[Path]) -> None:
    """Says, once in a process, which of two runs is taken where one name is both a path and a name in ``runs_dir``."""
    for other in others:
        with contextlib.suppress(OSError):  # where nobody may look, nothing is meant
            if is_run(other) and not other.samefile(taken):
                _say_once(
                    f"lockstep: {run} is a run's path and a run's name in {other.parent}; {taken.absolute()} is taken"
                )


def with_name(path: Path) -> Path:
    """A run's directory as a path that ends in its name, which ``.`` and ``..`` don't."""
    return path.resolve() if path.name in ("", "..") else path


def is_run(path: Path) -> bool:
    """Whether a directory is a run's: it has a config, perhaps torn, or a checkpoint that has kept it.

    A config of that name that is another program's, a model's for one, is none.
    """
    if "config" in (newest_manifest(path / CHECKPOINTS) or {}):
        return True
    if not (path / CONFIG).is_file():
        return False
    try:
        found = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(found, dict) or not found or isinstance(found.get("env"), dict)


def seeds_in(path: Path) -> list[Path]:
    """The runs of single seeds inside a run of several, in the order of their seeds."""
    found = {p.parent.name.removeprefix(SEED): p.parent for p in path.glob(f"{SEED}*/{CONFIG}")}
    return [found[seed] for seed in sorted(filter(str.isdecimal, found), key=int)]
