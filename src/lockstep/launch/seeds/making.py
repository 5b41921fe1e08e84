"""Makes the directories and configs of a group's runs, and removes them again if the group can't begin."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from lockstep.config.run import Config
from lockstep.runs.checkpoint import checkpoints_in
from lockstep.runs.directory import CHECKPOINTS, CONFIG, SEED, RunDirectory
from lockstep.runs.finding import is_run, seeds_in, with_name
from lockstep.runs.groups import GROUP_JSON, places_of, remember_seeds
from lockstep.runs.listing import last_record
from lockstep.runs.making import create_run
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trust import remember_names


def place_of_seeds(group: Path, config: Config) -> str | None:
    """Returns the place on the mirror for a group's runs, ``MIRROR/GROUP``; None without a mirror in ``config``.

    A group that is named by a link has its place by the link's name, as a single run does, because other hosts have
    only that. One that has been mirrored by its directory's name, and never by the link's, stays there.
    """
    mirror = config.checkpoint.mirror
    if mirror is None:
        return None
    given, own = (f"{mirror.rstrip('/')}/{name}" for name in (with_name(group).name, group.resolve().name))
    if given == own or (recorded := places_of(group)) is None:
        return own if seeds_in(group) else given  # older versions wrote down no places
    return own if own in recorded and given not in recorded else given


def config_of_seed(group: Path, config: Config, seed: int) -> Config:
    """Returns the config of one seed's run in a group with ``config``, with the group's place as its mirror."""
    place = place_of_seeds(group, config)
    if place is None:
        return config.model_copy(update={"seed": seed})
    checkpoint = config.checkpoint.model_copy(update={"mirror": place})
    return config.model_copy(update={"seed": seed, "checkpoint": checkpoint})


def make_seeds(group: RunDirectory, config: Config, seeds: Sequence[int], trust: bool) -> list[Path]:
    """Makes the missing directories of seeds' runs, with their configs; returns the paths of all.

    Before that, the group's seeds and its place on a mirror are written down. What a config names counts from then on
    as what this user has trained with, unless it is trusted only this once.
    """
    place = place_of_seeds(group.path, config)
    remember_seeds(group, seeds, () if place is None else (place,))
    paths = [group.path / f"{SEED}{seed}" for seed in seeds]
    for seed, path in zip(seeds, paths, strict=True):
        own = config_of_seed(group.path, config, seed)
        if not is_run(path):
            create_run(str(group.path), path.name, own).unlock()
        if not trust:
            remember_names(own)
    return paths


def has_trained(path: Path) -> bool:
    """Tells whether a run, or any seed of a group, has a checkpoint or a metrics record."""
    runs = (path, *seeds_in(path))
    return any(checkpoints_in(run / CHECKPOINTS) or last_record(run / METRICS_JSONL) for run in runs)


def could_be_group(path: Path, seeds: Sequence[int]) -> bool:
    """Tells whether a run may be a group of these seeds that was killed before it wrote them down."""
    if has_trained(path) or path in seeds_in(path.parent):
        return False
    return stored_config(path, warn=False).seed == seeds[0]


def take_back(group: RunDirectory, before: Collection[str]) -> bool:
    """Removes the seeds and files that a refused session made in a group, unless one of these seeds has trained.

    Args:
        group: its directory, locked.
        before: names in the directory when the session began.

    Returns:
        Whether they were removed.
    """
    made = [entry for entry in group.path.iterdir() if entry.name not in before]
    seeds = [entry for entry in made if entry.name.startswith(SEED)]
    if any(map(has_trained, seeds)):
        return False
    for seed in seeds:
        shutil.rmtree(seed, ignore_errors=True)
    for file in {group.path / CONFIG, group.path / GROUP_JSON}.intersection(made):
        file.unlink()
    return True


def remove_if_empty(group: RunDirectory) -> None:
    """Unlocks a group's directory, and removes it if it is empty; a link to a directory stays."""
    group.unlock()
    with contextlib.suppress(OSError):
        group.path.rmdir()
