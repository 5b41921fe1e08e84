"""Makes the directory of a new run, if no other run is in the way."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.run import Config
from lockstep.core.files import new_directory, quoted
from lockstep.runs.directory import CHECKPOINTS, CONFIG, OWN_NAMES, RunDirectory, writing
from lockstep.runs.finding import is_run, seeds_in
from lockstep.runs.groups import GROUP_JSON
from lockstep.runs.links import odd_entry
from lockstep.runs.trackers import METRICS_JSONL, TRACKERS_JSON

TORN = (f".{CONFIG}.tmp", f".{GROUP_JSON}.tmp")
"""Files that a process leaves if it is killed while it writes the first file of a run, or of a group."""


def default_name(config: Config, seeds: Sequence[int] = ()) -> str:
    """Returns a name of environment, seeds and time, e.g. ``CartPole-v1-seed0-20260131-120000``."""
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    named = f"seeds{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"seed{config.seed}"
    return f"{env}-{named}-{time.strftime('%Y%m%d-%H%M%S')}"


def create_run(runs_dir: str, name: str | None, config: Config, seeds: Sequence[int] = ()) -> RunDirectory:
    """Makes a run directory with its ``config.json``, and returns it locked; its default name contains ``seeds``.

    Raises:
        ValueError: the name is taken, or the directory can't be written; one line.
    """
    path = Path(runs_dir) / (name or default_name(config, seeds))
    if os.path.isfile(runs_dir):
        raise ValueError(f"runs_dir: {runs_dir} is a file; give a directory, in which run directories are made")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path = new_directory(path) if name is None else path
    run = RunDirectory(path)
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ValueError(f"name: run {path} exists already, as a file; choose another --name")
        path.mkdir(exist_ok=True)
        if (odd := odd_entry(path)) is not None:
            raise ValueError(f"name: run {path} exists already, and {odd}; choose another --name")
        run.lock()
    with contextlib.ExitStack() as stack, writing(path):
        stack.callback(run.unlock)
        if not _untouched(path):
            raise ValueError(f"name: run {path} exists already{_what_then(path, config)}")
        for left in (*TORN, TRACKERS_JSON):  # a new run isn't the failed one at a service either
            (path / left).unlink(missing_ok=True)
        run.write_config(config)
        stack.pop_all()
    return run


def _untouched(path: Path) -> bool:
    """Tells whether a directory is empty, or holds only a run that never completed an iteration."""
    if not path.is_dir() or not {p.name for p in path.iterdir()} <= {*OWN_NAMES, *TORN}:
        return False
    metrics = path / METRICS_JSONL
    if (metrics.is_file() and metrics.stat().st_size > 0) or any((path / CHECKPOINTS).glob("step_*")):
        return False
    config = path / CONFIG
    try:
        return not config.exists() or not config.stat().st_size or bool(Config.model_validate_json(config.read_text()))
    except ValueError:
        return False


def _what_then(path: Path, config: Config) -> str:
    """Says what is in a directory where a run with this config can't begin, and what to do instead."""
    if not is_run(path) and (seeds := seeds_in(path)):  # each was brought from its mirror by itself
        names = f"{seeds[0].name} … {seeds[-1].name}" if seeds[1:] else seeds[0].name
        one = f"--resume {quoted(seeds[0])} continues {'one of them' if seeds[1:] else 'it'} by itself"
        return f", with {names} but no {CONFIG} of a group; {one}, another --name starts a new group"
    if not is_run(path):
        return ", with files that are no run's; choose another --name"
    several = "; several seeds of a name are --seeds 0-4" if _differs_in_seed(path, config) else ""
    return f"; --resume {quoted(path)} continues it, another --name starts a new one{several}"


def _differs_in_seed(path: Path, config: Config) -> bool:
    """Tells whether the run in ``path`` has this config with another seed; False if it can't be read."""
    try:
        there = json.loads((path / CONFIG).read_text())
        return there.pop("seed") != config.seed and there == config.model_dump(mode="json", exclude={"seed"})
    except (OSError, ValueError, AttributeError, KeyError):
        return False


def has_begun(path: Path) -> bool:
    """Tells whether a directory holds a run with more than an empty config, which a crash at the start leaves."""
    empty = (path / CONFIG).is_file() and (path / CONFIG).stat().st_size == 0
    return is_run(path) and not (empty and _untouched(path))
