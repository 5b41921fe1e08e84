"""Finds the ``total_steps`` of a run's first iterations: schedules depend on it, and it may have changed since."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.run import Config
from lockstep.report.lengths import lengths_of
from lockstep.training.schedules import follows_length


def first_length(run: Path, stored: Config, iterations: int) -> int:
    """Returns the ``total_steps`` with which a run's first iterations were trained, even if it has changed since.

    Raises:
        ValueError: one line, if it changed within these iterations and schedules depend on it.
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
    """Returns how many iterations schedules allow, for a run those before ``total_steps`` first changed.

    None if no schedule depends on ``total_steps``.
    """
    if not follows_length(config):
        return None
    changes = [] if run is None else lengths_of(run, config.model_dump(mode="json"))
    before = [max(1, changes[0]["global_step"] // config.steps_per_iteration)] if changes else []
    return min([config.num_iterations, *before])
