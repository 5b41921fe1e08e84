"""By which ``total_steps`` a run trained its first iterations: schedules fall by it, and it may have changed since."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.run import Config
from lockstep.report.lengths import lengths_of
from lockstep.training.limits import follows_length


def first_length(run: Path, stored: Config, iterations: int) -> int:
    """Reads the ``total_steps`` by which a run's first iterations were trained, which may be no longer those it has.

    Raises:
        ValueError: schedules fall by several in these iterations; one line.
    """
    changes = lengths_of(run, stored.model_dump(mode="json")) if follows_length(stored) else []
    if not changes:
        return stored.total_steps
    step, was = changes[0]["global_step"], changes[0]["was"]
    if iterations * stored.steps_per_iteration > step:
        raise ValueError(
            f"schedules of {run} fall by total_steps {was} until step {step} and by {changes[0]['is']} from there on; "
            f"use --iterations {step // stored.steps_per_iteration}"
        )
    return was


def most_iterations(run: Path | None, config: Config) -> int | None:
    """How many iterations schedules allow, of a run those of its first length; None: no schedule follows a length."""
    if not follows_length(config):
        return None
    changes = [] if run is None else lengths_of(run, config.model_dump(mode="json"))
    before = [max(1, changes[0]["global_step"] // config.steps_per_iteration)] if changes else []
    return min([config.num_iterations, *before])
