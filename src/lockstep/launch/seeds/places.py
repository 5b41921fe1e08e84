"""Where on a mirror a seed of a group is copied to: the place that the group gives it, or one that it was given.

A group gives its seeds ``MIRROR/GROUP``. Their configs name it, so in a copy of the group they name the original's.
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
from lockstep.runs.finding import seeds_in
from lockstep.runs.groups import places_of, remember_places
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import trusted_names


def own_places_of(group: Path, seeds: Iterable[Config]) -> set[str]:
    """Finds places on mirrors that are the group's, or its original's: by its record, else those that seeds share."""
    if (recorded := places_of(group)) is not None:
        return set(recorded)
    places = [stored.checkpoint.mirror for stored in seeds]  # read only here: one that can't be may lie beside others
    return {place for place in places if place is not None and (places.count(place) > 1 or len(places) == 1)}


def in_its_place(settings: dict[str, Any], before: str | None, now: str | None) -> dict[str, Any]:
    """Adds a seed's place on the mirror where it is that of a group of another name: this one's, or an original's."""
    if not _is_renamed(before, now) or "mirror" in settings.get("checkpoint", {}):
        return settings
    return {**settings, "checkpoint": {**settings.get("checkpoint", {}), "mirror": now}}


def _is_renamed(before: str | None, now: str | None) -> bool:
    """Tells whether two places on one mirror differ, and that in the group's name alone."""
    if before is None or now is None or before == now:
        return False
    return before.rpartition("/")[0] == now.rpartition("/")[0]


def keep_places(group: RunDirectory, config: Config) -> None:
    """Writes down which places on mirrors are the group's, before a seed leaves one: then nobody could tell any more.

    Args:
        group: its directory, locked.
        config: of the group, as it goes on.
    """
    place = place_of_seeds(group.path, config)
    own_places = own_places_of(group.path, (stored_config(run, warn=False) for run in seeds_in(group.path)))
    remember_places(group, [*sorted(own_places), *(() if place is None else (place,))])


@dataclass(frozen=True)
class Move:
    """Where a seed is mirrored that goes on by itself in a group which was copied or renamed.

    Attributes:
        group: its directory.
        before: the place of the group of before, which the seed's config still names.
        now: the place that is the group's by its name.
    """

    group: Path
    before: str
    now: str


def _move_of(run: Path) -> Move | None:
    """Finds where a seed is to be mirrored; None: where it is, as any run that lies in no group, or has its own place.

    What can't be read of the group moves nothing.
    """
    run = run.resolve()  # not as it was spelled: what a link leads to is the original
    number = run.name.removeprefix(SEED)
    if not (run.name.startswith(SEED) and number.isdecimal()):
        return None
    try:  # in which it fails where a seed lies that was brought from its mirror by itself: there is no group's config
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
    """Reads the config of a run that goes on by itself; arguments and errors as :func:`resumed_config`.

    A seed of a group that was copied or renamed has the group's place on its mirror, not its original's, as the single
    run has that was copied; but where the user has just named the original's.
    """
    move = _move_of(run)
    if move is not None and move.before not in named and (trust or move.before in trusted_names()):
        overrides, named = in_its_place(nested(overrides), move.before, move.now), {*named, move.now}
    return resumed_config(run, overrides, trust, warn, named)


def say_move(run: Path, config: Config) -> None:
    """Says where a seed is mirrored from here on that leaves its original's place, and writes that down in its group.

    To be called before the config is written. Where it can't be written down, a warning says how the others follow.

    Args:
        run: its directory, locked.
        config: with which it goes on.
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
