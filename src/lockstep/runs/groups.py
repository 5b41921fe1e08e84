"""Keeps the records of a group of seeds: a directory with one run per seed, their curves and a common summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import one_line
from lockstep.core.files import is_finite, write_json
from lockstep.runs.checkpoint import checkpoints_in, step_of
from lockstep.runs.curves import (
    CURVES_PNG,
    METRIC,
    MISSING_PLOT,
    Curve,
    can_plot,
    draw_curves,
    interquartile_mean,
    seeds_in_a_curve,
    single_seed,
    write_curves,
)
from lockstep.runs.directory import CHECKPOINTS, SEED, SUMMARY, RunDirectory
from lockstep.runs.finding import seeds_in
from lockstep.runs.listing import FINISHED, object_if_any, status_of
from lockstep.runs.progress import MEASURED

INCIDENTS = ("restarts", "restarted_environments", "missing_rows")
OWN = (
    *("seed", "status", "global_step", "final_return", "episodes", "best_checkpoint", "params_sha256", "state_sha256"),
    *INCIDENTS,
)
"""Keys that a group's summary has for each seed."""
DIFFERENT = {*OWN, "final_success_rate", "wall_time", "steps_per_second", "best_evaluation", "last_evaluation"}
"""Keys of a seed's summary that the group's own doesn't copy."""
OF_A_SESSION = ("command", "wall_time", "steps_per_second")
"""Keys about the session that wrote the summary; a session that finds all seeds finished keeps the earlier values."""
TAKEN_BY_ALL = ("iteration", "global_step")
"""Keys for which the summary takes the lowest value of all seeds: the curves end there."""
GROUP_JSON = "group.json"
"""Holds the group's ``seeds``, from before their runs are made, the ``wall_time`` of earlier sessions, and the group's
``places`` on mirrors, under every name that it has had."""


@dataclass(frozen=True)
class Before:
    """How far a group was when its session began.

    Attributes:
        wall_time: of earlier sessions, in seconds.
        steps: of each run, by its directory.
        summary: of the session before.
    """

    wall_time: float = 0.0
    steps: Mapping[Path, int] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


def remember_seeds(group: RunDirectory, seeds: Sequence[int], places: Iterable[str] = ()) -> None:
    """Writes down a group's seeds, so that a group which is killed while it makes their runs resumes with all of them.

    ``places`` are as in :func:`remember_places`; the group records them from the start, even if it has no mirror.
    """
    _keep(group, {"seeds": list(seeds), "places": _with_places(group.path, places)})


def remember_places(group: RunDirectory, places: Iterable[str]) -> None:
    """Adds to a group's places on mirrors, so that none of them is taken for a seed's own.

    Args:
        group: its directory.
        places: where its runs are mirrored, as ``MIRROR/GROUP``.
    """
    _keep(group, {"places": _with_places(group.path, places)})


def places_of(group: Path) -> list[str] | None:
    """Returns the places that :func:`remember_places` wrote; None if an older version wrote none, or if unreadable."""
    places = _kept(group).get("places")
    return [place for place in places if isinstance(place, str)] if isinstance(places, list) else None


def _with_places(group: Path, places: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*(places_of(group) or ()), *places)))


def forget_seeds(group: RunDirectory) -> None:
    """Removes what :func:`remember_seeds` wrote, because the group can't begin."""
    if group.is_writer:
        (group.path / GROUP_JSON).unlink(missing_ok=True)


def seeds_of(group: Path) -> list[int]:
    """Returns the seeds of a group, sorted: those it was started with, and those it has runs of; none for a single run.

    Older versions didn't write down which seeds a group was started with; then it has those of its runs.
    """
    asked = _kept(group).get("seeds")
    kept = [seed for seed in asked if type(seed) is int and seed >= 0] if isinstance(asked, list) else []
    return sorted({*kept, *(int(each.name.removeprefix(SEED)) for each in seeds_in(group))})


def begin_group(group: RunDirectory, runs: Sequence[Path]) -> Before:
    """Begins a session of a group: removes the earlier session's summary, and returns how far the runs are."""
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
    """Writes a group's curves and its ``summary.json``, and returns the summary; draws the curves after that.

    Args:
        group: its directory.
        seeds: summaries of its runs that have one, by their directories.
        count: number of its runs.
        seconds: duration of this session.
        say: shows a line to the user.
        before: how far the group was when the session began.
    """
    directories = {summary["seed"]: path for path, summary in seeds.items()}
    first = next(iter(seeds.values()))
    curve = write_curves(group.path, directories)
    listed = [{name: each.get(name) for name in OWN} | {"directory": path.name} for path, each in seeds.items()]
    known = bool(curve.iterations)
    steps = sum(max(0, each["global_step"] - before.steps.get(path, 0)) for path, each in seeds.items())
    summary = {
        "status": status_of([each["status"] for each in seeds.values()], count),
        **{name: value for name, value in first.items() if name not in DIFFERENT},
        "command": None if group.facts.command is None else list(group.facts.command),
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
    if can_plot():
        title = f"{first['environment']}, {seeds_in_a_curve(len(seeds), count)}"
        _draw(group, title, curve, single_seed(next(iter(seeds)).name, count))
    else:
        say(MISSING_PLOT.format(CURVES_PNG))
    return summary


def _draw(group: RunDirectory, title: str, curve: Curve, alone: str) -> None:
    """Draws a group's curves; if matplotlib can't, that is only a warning, because the group is done."""
    try:
        draw_curves(group.path, title, curve, alone)
    except Exception as error:
        (group.path / CURVES_PNG).unlink(missing_ok=True)  # of the curves before
        group.warn(f"{group.path / CURVES_PNG} isn't written: {one_line(error)}")


def together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the records of seeds that one program trains at once: adds steps and speeds, averages returns.

    Args:
        records: each seed's record of the iteration.

    Returns:
        A record for the progress display; its return is the interquartile mean.
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
    """Combines the records of seeds that processes train side by side and in turn.

    Speeds aren't added, because a seed that has ended or is starting has none. Returns of seeds that have just begun
    aren't averaged with those of trained ones.

    Args:
        running: the last record of each seed that trains.
        ended: the last record of each seed that has been trained to its end.
        others: the last record of each seed that waits or has failed; only their steps count.
        steps_per_second: of all seeds together; None if unknown yet.

    Returns:
        A record for the progress display. Its return is the interquartile mean over the seeds that have ended, or, as
        long as none has, over those that run; ``return_of`` says which.
    """
    shown = ended or running
    return {
        "global_step": sum(record["global_step"] for record in (*running, *ended, *others)),
        METRIC: _mean_return(shown),
        "return_of": f"{len(shown)} {'ended' if ended else 'running'}",
        "time/global_fps": steps_per_second,
        MEASURED: True,
    }


def _mean_return(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the interquartile mean of the known returns; None if none is known."""
    returns = [record[METRIC] for record in records if record[METRIC] is not None]
    return float(interquartile_mean(np.array(returns))) if returns else None
