"""Describes what a run has reached, for its cards and for the table of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.report.reading import RunFiles
from lockstep.report.settings import config_with_seeds
from lockstep.report.words import UNKNOWN, in_digits
from lockstep.runs.curves import seeds_in_a_curve, single_seed, what_few_cover
from lockstep.runs.listing import number
from lockstep.runs.progress import last_episodes


@dataclass(frozen=True)
class Result:
    """What a run has reached, in words.

    Attributes:
        seed: the run's seed, or its seeds.
        final_return: the final return.
        mean_of: what the final return is a mean of.
        interval: 95 % interval of the mean over seeds, of few seeds with how often it holds the truth; empty for a
            single run or seed, and once a seed was trained further by itself.
        steps: steps taken; if seeds have taken different numbers, the smallest and the largest.
        steps_of: whose steps these are; empty for a single run.
        speed: steps per second over all sessions, of all seeds together.
    """

    seed: str
    final_return: str
    mean_of: str
    interval: str
    steps: str
    steps_of: str
    speed: str


def result_of(run: RunFiles) -> Result:
    """Returns what a run, or a run with several seeds, has reached."""
    seed, final = str(config_with_seeds(run).get("seed", UNKNOWN)), in_digits(run.row.final_return)
    speed = in_digits(_steps_per_second(run))
    if not run.seeds:
        return Result(seed, final, last_episodes(_episodes(run)), "", in_digits(run.row.steps), "", speed)
    if len(run.seeds) == 1:
        return Result(seed, final, "of one seed", "", in_digits(run.row.steps), "of one seed", speed)
    each = {seed.row.steps for seed in run.seeds}
    known = [steps for steps in each if steps is not None]
    steps, steps_of = in_digits(run.row.steps), f"of each of {len(run.seeds)} seeds"
    if len(each) > 1 and known:
        steps = f"{in_digits(0 if None in each else min(known))} … {in_digits(max(known))}"
        steps_of = f"of {len(run.seeds)} seeds"
    if len(run.counted) == 1:  # older versions wrote an interval here, too: ignore it
        mean_of = f"of {single_seed(run.counted[0].name, len(run.seeds))}"
        return Result(seed, final, mean_of, "", steps, steps_of, speed)
    mean_of = f"interquartile mean over {seeds_in_a_curve(len(run.counted), len(run.seeds))}"
    interval = _interval(run.summary.get("final_return_interval"), len(run.counted))
    return Result(seed, final, mean_of, interval, steps, steps_of, speed)


def _steps_per_second(run: RunFiles) -> float | None:
    """Returns steps over wall time of all sessions; ``summary.json`` has the speed of the last session only."""
    seconds = number(run.summary, "wall_time")
    if seconds is None or seconds <= 0:
        return None
    return sum(each.row.steps or 0 for each in run.seeds or [run]) / seconds


def _interval(ends: Any, seeds: int) -> str:
    if not isinstance(ends, list) or len(ends) != 2:
        return ""
    return f"{in_digits(ends[0])} … {in_digits(ends[1])}{what_few_cover(seeds)}"


def _episodes(run: RunFiles) -> int | None:
    """Returns how many episodes have ended in a run, by its summary or its last row; None if unknown."""
    rows = run.records[-1] if run.records else []
    count = number(run.summary, "episodes")
    if count is None and rows:
        count = number(rows[-1], "rollout/episodes")
    return None if count is None else int(count)
