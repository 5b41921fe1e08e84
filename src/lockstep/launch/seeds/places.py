"""Finds where a seed of a group is mirrored: in the group's place, or in one that the user gave to the seed.

The group's place is ``MIRROR/GROUP``. Seeds' configs name it; so in a copied or renamed group, they still name the
original's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.files import nested
from lockstep.config.redact import shown_url
from lockstep.config.run import Config
from lockstep.core.process import say
from lockstep.launch.resume import resumed_config
from lockstep.launch.seeds.making import place_of_seeds
from lockstep.runs.directory import SEED, RunDirectory
from lockstep.runs.finding import seeds_in, with_name
from lockstep.runs.groups import places_of, remember_places
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import trusted_names


def own_places_of(group: Path, seeds: Iterable[Config]) -> set[str]:
    """Returns the places on mirrors that are the group's or its original's: those recorded, else those seeds share."""
    if (recorded := places_of(group)) is not None:
        return set(recorded)
    places = [stored.checkpoint.mirror for stored in seeds]  # read only if needed: one seed may be unreadable
    return {place for place in places if place is not None and (places.count(place) > 1 or len(places) == 1)}


def in_its_place(settings: dict[str, Any], before: str | None, now: str | None) -> dict[str, Any]:
    """Adds the place ``now`` to a seed's settings if its place ``before`` differs in the group's name alone."""
    if not _is_renamed(before, now) or "mirror" in settings.get("checkpoint", {}):
        return settings
    return {**settings, "checkpoint": {**settings.get("checkpoint", {}), "mirror": now}}


def _is_renamed(before: str | None, now: str | None) -> bool:
    """Tells whether two places differ in the group's name alone."""
    if before is None or now is None or before == now:
        return False
    return before.rpartition("/")[0] == now.rpartition("/")[0]


def keep_places(group: RunDirectory, config: Config) -> None:
    """Writes down which places on mirrors are the group's, before a seed leaves one and it can't be told any more.

    Args:
        group: its directory, locked.
        config: with which the group continues.
    """
    place = place_of_seeds(group.path, config)
    own_places = own_places_of(group.path, (stored_config(run, warn=False) for run in seeds_in(group.path)))
    remember_places(group, [*sorted(own_places), *(() if place is None else (place,))])


@dataclass(frozen=True)
class Move:
    """The change of a seed's place on a mirror, because it resumes alone in a copied or renamed group.

    Attributes:
        group: the group's directory.
        before: the original group's place, which the seed's config still names.
        now: the group's place by its present name.
    """

    group: Path
    before: str
    now: str


def _move_of(run: Path) -> Move | None:
    """Finds the change of a run's place; None if it is in no group, has its own place, or is in the right one.

    If the group can't be read, the place doesn't change.
    """
    run = run.resolve() if run.is_symlink() else with_name(run)  # a link to a seed leads to the original
    number = run.name.removeprefix(SEED)
    if not (run.name.startswith(SEED) and number.isdecimal()):
        return None
    try:  # fails if the seed was fetched from its mirror alone, without the group's config
        before = stored_config(run, warn=False).checkpoint.mirror
        now = place_of_seeds(run.parent, stored_config(run.parent, warn=False))
        if before is None or now is None or not _is_renamed(before, now):
            return None
        own_places = own_places_of(run.parent, (stored_config(each, warn=False) for each in seeds_in(run.parent)))
    except ValueError:
        return None
    return Move(run.parent, before, now) if before in own_places else None


def resumed_run(
    run: Path, overrides: dict[str, Any], trust: bool = False, warn: bool = True, named: Collection[str] = ()
) -> Config:
    """Reads the config of a run that resumes alone; arguments and errors are those of :func:`resumed_config`.

    A seed of a copied or renamed group gets the group's present place on the mirror, as a single run that was copied
    does, unless the user has just named the original's place.
    """
    move = _move_of(run)
    if move is not None and move.before not in named and (trust or move.before in trusted_names()):
        overrides, named = in_its_place(nested(overrides), move.before, move.now), {*named, move.now}
    return resumed_config(run, overrides, trust, warn, named)


def say_move(run: Path, config: Config) -> None:
    """Says where a seed is mirrored from here on if its place changes, and writes the places down in its group.

    It must be called before the config is written. If the places can't be written down, a warning says what to give
    when the other seeds are resumed.

    Args:
        run: its directory, locked.
        config: with which it continues.
    """
    move = _move_of(run)
    if move is None or config.checkpoint.mirror != move.now:
        return
    name = run.resolve().name
    before, now = shown_url(move.before), shown_url(move.now)
    stays = f"what is at {before}/{name} stays"
    say(f"lockstep: checkpoint.mirror: the run is copied to {now}/{name} from here on; {stays}")
    group = RunDirectory(move.group)
    try:
        group.lock()
        try:
            keep_places(group, stored_config(move.group, warn=False))
        finally:
            group.unlock()
    except (ValueError, OSError) as error:
        follow = f"give the group's other seeds --checkpoint.mirror {now} when they go on"
        say(f"lockstep: warning: where the group is mirrored can't be written down ({error}); {follow}")
