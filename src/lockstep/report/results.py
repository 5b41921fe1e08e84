"""Says what a run has reached, for its cards and for the table of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.report.reading import RunFiles, number
from lockstep.report.settings import config_with_seeds
from lockstep.report.words import UNKNOWN, in_digits
from lockstep.runs.progress import last_episodes


@dataclass(frozen=True)
class Result:
    """What a run has reached, in words.

    Attributes:
        seed: its own, or those of several.
        final_return: its number.
        mean_of: what that is a mean of.
        interval: of the mean over seeds, at 95 %; empty of a single run, or seed.
        steps: that it has taken; of seeds that aren't equally far, those of the first and the last.
        steps_of: whose they are; empty of a single run.
    """

    seed: str
    final_return: str
    mean_of: str
    interval: str
    steps: str
    steps_of: str


def result_of(run: RunFiles) -> Result:
    """Gathers what a run has reached, or several seeds."""
    seed, final = str(config_with_seeds(run).get("seed", UNKNOWN)), in_digits(run.row.final_return)
    if not run.seeds:
        return Result(seed, final, last_episodes(_episodes(run)), "", in_digits(run.row.steps), "")
    if len(run.seeds) == 1:  # whose interval, in summaries of older versions, is none
        return Result(seed, final, "of one seed", "", in_digits(run.row.steps), "of one seed")
    each = {seed.row.steps for seed in run.seeds}
    known = [steps for steps in each if steps is not None]
    steps, steps_of = in_digits(run.row.steps), f"of each of {len(run.seeds)} seeds"
    if len(each) > 1 and known:
        steps = f"{in_digits(0 if None in each else min(known))} … {in_digits(max(known))}"
        steps_of = f"of {len(run.seeds)} seeds"
    mean_of = f"interquartile mean over {len(run.seeds)} seeds"
    return Result(seed, final, mean_of, _interval(run.summary.get("final_return_interval")), steps, steps_of)


def _interval(ends: Any) -> str:
    if not isinstance(ends, list) or len(ends) != 2:
        return ""
    return f"{in_digits(ends[0])} … {in_digits(ends[1])}"


def _episodes(run: RunFiles) -> int | None:
    """How many episodes a run has ended, as its summary or its last row says."""
    rows = run.records[-1] if run.records else []
    count = number(run.summary, "episodes")
    if count is None and rows:
        count = number(rows[-1], "rollout/episodes")
    return None if count is None else int(count)
