"""Makes the history's row of an update, and prints lines on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from lockstep.config.run import Config
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax_engine.distributed.processes import this_process
from lockstep.jax_engine.program.iterations import Iteration, numbers_of
from lockstep.runs.directory import is_writer

HISTORY = {
    "train/loss": "total_loss",
    "train/policy_loss": "actor_loss",
    "train/value_loss": "critic_loss",
}
"""Maps metrics to their names in JAX trainers; other ``train/…`` metrics only lose that prefix."""

Metrics = dict[str, float]
"""A row of the history by name."""


def say(line: str) -> None:
    """Prints a line on standard error, in one process."""
    if is_writer(this_process()):
        print(f"lockstep: {line}", file=sys.stderr, flush=True)


def history_of(rows: Sequence[Metrics]) -> PPOMetricsHistory:
    """Makes the history of updates' rows; a name that a row doesn't have is NaN there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return PPOMetricsHistory(**{name: np.array([row.get(name, np.nan) for row in rows]) for name in names})


def metrics_of(iteration: Iteration, config: Config) -> Metrics:
    """Returns the history's row of an update.

    ``episode_return`` and ``episode_length`` are means over the episodes that ended in it (the newest hundred), NaN if
    none did; ``episodes`` is their number.
    """
    out: Metrics = {}
    for name, value in numbers_of(iteration, config).items():
        out[HISTORY.get(name, name.removeprefix("train/"))] = np.nan if value is None else float(value)
    newest = iteration.episodes.newest
    returns, lengths = [r for r, _, _ in newest], [n for _, n, _ in newest]
    out["episode_return"] = float(np.mean(returns)) if newest else np.nan
    out["episode_length"] = float(np.mean(lengths)) if newest else np.nan
    out["episodes"] = float(iteration.episodes.count)
    return out
