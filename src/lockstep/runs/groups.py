"""A group of seeds: a directory with one run a seed, their curves and a summary of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.files import is_finite, write_json
from lockstep.runs.checkpoint import checkpoints_in, step_of
from lockstep.runs.curves import (
    CURVES_PNG,
    METRIC,
    MISSING_PLOT,
    can_plot,
    interquartile_mean,
    seeds_in_a_curve,
    write_curves,
)
from lockstep.runs.directory import CHECKPOINTS, SEED, SUMMARY, RunDirectory
from lockstep.runs.finding import seeds_in
from lockstep.runs.listing import object_if_any

INCIDENTS = ("restarts", "restarted_environments", "missing_rows")
OWN = (
    *("seed", "status", "global_step", "final_return", "episodes", "best_checkpoint", "params_sha256", "state_sha256"),
    *INCIDENTS,
)
"""What the summary of a group says of each seed."""
FINISHED = "finished"
DIFFERENT = {*OWN, "final_success_rate", "wall_time", "steps_per_second", "best_evaluation", "last_evaluation"}
"""What of a seed's summary the group's doesn't say as its own."""
OF_A_SESSION = ("command", "wall_time", "steps_per_second")
"""What it says of the session that wrote it; one that finds all seeds finished leaves what the session before said."""
TAKEN_BY_ALL = ("iteration", "global_step")
"""What it says as that of the seed that is least far: up to there the curves go."""
GROUP_JSON = "group.json"
"""What a group keeps beside its config: its ``seeds``, before they are made, ``wall_time`` of earlier sessions, and the
``places`` on mirrors that were the group's own, under the names that it has had."""


@dataclass(frozen=True)
class Before:
    """How far a group was when its session began.

    Attributes:
        wall_time: of the sessions before, in seconds.
        steps: of each run, by its directory.
        summary: that it had.
    """

    wall_time: float = 0.0
    steps: Mapping[Path, int] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


def remember_seeds(group: RunDirectory, seeds: Sequence[int], places: Iterable[str] = ()) -> None:
    """Writes down which seeds a group is of, so that one which is killed while it makes them goes on with all.

    ``places`` as :func:`remember_places`, whose record a group has from the beginning, with a mirror or without.
    """
    _keep(group, {"seeds": list(seeds), "places": _with_places(group.path, places)})


def remember_places(group: RunDirectory, places: Iterable[str]) -> None:
    """Writes down places on mirrors that are the group's, beside those before, so that none is taken for a seed's own.

    Args:
        group: its directory.
        places: of its runs, as the group gives them: ``MIRROR/GROUP``.
    """
    _keep(group, {"places": _with_places(group.path, places)})


def places_of(group: Path) -> list[str] | None:
    """Returns what :func:`remember_places` wrote; None of a group of a version that didn't, or what can't be read."""
    places = _kept(group).get("places")
    return [place for place in places if isinstance(place, str)] if isinstance(places, list) else None


def _with_places(group: Path, places: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*(places_of(group) or ()), *places)))


def forget_seeds(group: RunDirectory) -> None:
    """Removes what :func:`remember_seeds` wrote, of a group that can't begin."""
    if group.is_writer:
        (group.path / GROUP_JSON).unlink(missing_ok=True)


def seeds_of(group: Path) -> list[int]:
    """Returns the seeds of a group, in order: those it was asked for, and those it has; none of a single run.

    Groups of versions that didn't write down which were asked for are of those they have.
    """
    asked = _kept(group).get("seeds")
    kept = [seed for seed in asked if type(seed) is int and seed >= 0] if isinstance(asked, list) else []
    return sorted({*kept, *(int(each.name.removeprefix(SEED)) for each in seeds_in(group))})


def begin_group(group: RunDirectory, runs: Sequence[Path]) -> Before:
    """Begins a session of a group: removes the summary of the one before, and returns how far its runs are."""
    summary = object_if_any(group.path / SUMMARY)
    wall_time = summary.get("wall_time", _kept(group.path).get("wall_time"))
    before = Before(
        float(wall_time) if is_finite(wall_time) else 0.0,
        {run: next((step_of(each) or 0 for each in checkpoints_in(run / CHECKPOINTS)), 0) for run in runs},
        summary,
    )
    _keep(group, {"wall_time": before.wall_time})
    group.remove_summary()
    return before


def _keep(group: RunDirectory, facts: Mapping[str, Any]) -> None:
    if group.is_writer:
        write_json(group.path / GROUP_JSON, {**_kept(group.path), **facts})


def _kept(group: Path) -> dict[str, Any]:
    return object_if_any(group / GROUP_JSON)


def finish_group(
    group: RunDirectory,
    seeds: Mapping[Path, Mapping[str, Any]],
    count: int,
    seconds: float,
    say: Callable[[str], None],
    before: Before = Before(),
) -> dict[str, Any]:
    """Writes a group's curves and its ``summary.json``, and returns that.

    Args:
        group: its directory.
        seeds: summaries of its runs, by their directories, as far as they have any.
        count: of its runs.
        seconds: that all took together in this session.
        say: shows a line to the user.
        before: how far the group was when it began.
    """
    directories = {summary["seed"]: path for path, summary in seeds.items()}
    first = next(iter(seeds.values()))
    title = f"{first['environment']}, {seeds_in_a_curve(len(seeds), count)}"
    curve = write_curves(group.path, title, directories, count)
    if not can_plot():
        say(MISSING_PLOT.format(CURVES_PNG))
    listed = [{name: each.get(name) for name in OWN} | {"directory": path.name} for path, each in seeds.items()]
    known = bool(curve.iterations)
    steps = sum(max(0, each["global_step"] - before.steps.get(path, 0)) for path, each in seeds.items())
    summary = {
        "status": status_of([each["status"] for each in seeds.values()], count),
        **{name: value for name, value in first.items() if name not in DIFFERENT},
        "command": None if group.command is None else list(group.command),
        **{name: min(each[name] for each in seeds.values()) for name in TAKEN_BY_ALL},
        "num_seeds": len(seeds),
        "final_return": curve.iqm[-1].item() if known else None,
        "final_return_interval": [end[-1].item() for end in curve.band] if known and curve.band else None,
        "wall_time": before.wall_time + seconds,
        "steps_per_second": steps / seconds,
        "seeds": listed,
    }
    if not steps and before.summary.get("status") == summary["status"] == FINISHED:
        summary |= {name: before.summary[name] for name in OF_A_SESSION if name in before.summary}
    group.write_summary(summary)
    return summary


def status_of(seeds: Sequence[str], count: int) -> str:
    """Returns the status of a group of ``count`` runs, of those that have one: finished, if all of them are."""
    others = [status for status in seeds if status != FINISHED]
    if others:
        return others[0]
    return FINISHED if len(seeds) == count else f"{len(seeds)} of {count} seeds finished"


def together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums up an iteration of seeds that one program trains at once: steps and speed of all, and their mean return.

    Args:
        records: each seed's of that iteration.

    Returns:
        What progress shows; the return is the interquartile mean.
    """
    return {
        "global_step": sum(record["global_step"] for record in records),
        METRIC: _mean_return(records),
        "time/global_fps": sum(record["time/global_fps"] for record in records),
    }


def together_in_turn(
    running: Sequence[Mapping[str, Any]],
    ended: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    steps_per_second: float | None,
) -> dict[str, Any]:
    """Sums up seeds that processes train side by side and in turn.

    Their speeds aren't added: a seed that has ended has none, and one that starts up has none yet. Nor are returns of
    seeds that have only begun averaged with those of trained ones.

    Args:
        running: the last record of each seed that trains.
        ended: of each seed that has been trained to its end.
        others: of each that has yet to go on, or has failed; only their steps count.
        steps_per_second: of all of them together; None: it isn't known yet.

    Returns:
        What progress shows; the return is the interquartile mean over seeds that have ended, before any has over those
        that run, as ``return_of`` says.
    """
    shown = ended or running
    return {
        "global_step": sum(record["global_step"] for record in (*running, *ended, *others)),
        METRIC: _mean_return(shown),
        "return_of": f"{len(shown)} {'ended' if ended else 'running'}",
        "time/global_fps": steps_per_second,
    }


def _mean_return(records: Sequence[Mapping[str, Any]]) -> float | None:
    """The interquartile mean of the returns that are known; None without any."""
    returns = [record[METRIC] for record in records if record[METRIC] is not None]
    return float(interquartile_mean(np.array(returns))) if returns else None
