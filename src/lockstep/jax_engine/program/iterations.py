"""What the program takes for an iteration and what it returns: learning rates, metrics and episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.core.episodes import WINDOW
from lockstep.jax_engine.statistics import FINITE
from lockstep.training.limits import minibatch_name, non_finite, non_finite_statistics
from lockstep.training.losses import loss_settings
from lockstep.training.metrics import Record, update_metrics
from lockstep.training.schedules import scheduled_coefficients, scheduled_learning_rate


class Inputs(NamedTuple):
    """The inputs of a call's iterations, arrays ``[n]``.

    Attributes:
        iteration: number of iterations before each, int32.
        learning_rate: float32.
        coefficients: scheduled coefficients of the loss by name, float32; None if none is scheduled.
    """

    iteration: Array
    learning_rate: Array
    coefficients: dict[str, Array] | None = None


class Outputs(NamedTuple):
    """The outputs of an iteration for the host.

    Attributes:
        metrics: float32 and int32 scalars, the same on every device; a call packs them into one matrix of words.
        returns: of episodes that ended, float32 ``[num_shards, T, rows]``.
        marks: 0 where none ended, else 4 times its length plus 1 (failure), 2 (success not said) or 3 (success).
    """

    metrics: dict[str, Array]
    returns: Array
    marks: Array


@dataclass(frozen=True)
class Finished:
    """Ended episodes: return, length and success of the newest hundred, by (step, environment), and the number of all.

    ``env_metrics`` are the environments' own metrics of those hundred; None if there are none.
    """

    newest: list[tuple[float, int, int]]
    count: int
    env_metrics: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class Iteration:
    """What the host learns of an iteration.

    Attributes:
        number: iterations done before it.
        numbers: Python numbers, or lists of them, by name; see :class:`lockstep.jax_engine.update.UpdateResult`.
        seconds: of the whole iteration.
        ended: when it ended, by the monotonic clock.
        parts: seconds of its parts, which add up to the whole; empty if they can't be told apart.
    """

    number: int
    numbers: dict[str, Any]
    episodes: Finished
    seconds: float
    ended: float
    parts: dict[str, float] = field(default_factory=dict)


def finished(returns: np.ndarray, marks: np.ndarray) -> list[Finished]:
    """Lists each iteration's ended episodes from a call's ``[n, num_shards, T, rows]``; see :class:`Outputs`."""
    found = np.flatnonzero(marks != 0)  # only the few that ended are sorted
    n, shards, steps, rows = marks.shape
    at, shard, step, row = np.unravel_index(found, marks.shape)
    order = np.ravel_multi_index((at, step, shard, row), (n, steps, shards, rows)).argsort(kind="stable")
    at, found = at[order], found[order]
    counts = np.bincount(at, minlength=len(marks))
    newest = counts.cumsum()[at] - np.arange(len(at)) <= WINDOW
    found = found[newest]
    chosen = marks.reshape(-1)[found]
    columns = (returns.reshape(-1)[found], chosen // 4, chosen % 4 - 2)
    episodes = zip(*(column.tolist() for column in columns), strict=True)
    return [Finished(list(islice(episodes, min(count, WINDOW))), count) for count in counts.tolist()]


def learning_rates(config: Config, first: int, count: int) -> np.ndarray:
    """Returns the learning rates of ``count`` iterations, float32; the adaptive schedule doesn't use them."""
    if config.ppo.schedule != "linear":
        return np.full(count, config.ppo.learning_rate, np.float32)
    done = [(first + n) * config.steps_per_iteration for n in range(count)]
    return np.array([scheduled_learning_rate(config, steps, config.ppo.learning_rate) for steps in done], np.float32)


def coefficients_of(config: Config, first: int, count: int) -> dict[str, np.ndarray] | None:
    """Returns the loss's scheduled coefficients of ``count`` iterations, float32 by name; None if none is scheduled."""
    if not scheduled_coefficients(config, 0):
        return None
    each = [scheduled_coefficients(config, (first + n) * config.steps_per_iteration) for n in range(count)]
    return {name: np.array([one[name] for one in each], np.float32) for name in each[0]}


def numbers_of(iteration: Iteration, config: Config) -> Record:
    """Returns ``train/…`` and ``reward/…`` of the metrics record; ``train/…`` are means over minibatches.

    Raises:
        NonFiniteError: if a loss or gradient was not finite, and no step was applied from there on; or if statistics
            of what is normalised aren't.
    """
    found, settings = iteration.numbers, loss_settings(config)
    if found["failed"] >= 0:
        where = minibatch_name(config, int(found["failed"]))
        unseen = None if iteration.parts else config.env.id  # on the host they are checked
        custom = config.network.custom
        raise non_finite(iteration.number + 1, where, settings.terms, found["failed_terms"], unseen, custom)
    for name in ("observations", "returns"):
        if not found.get(f"{FINITE}{name}", True):
            raise non_finite_statistics(iteration.number + 1, name)
    totals = ("terms", "evaluated", "grad_norm", "steps", "stopped_by_kl", "learning_rate")
    coefficients = scheduled_coefficients(config, iteration.number * config.steps_per_iteration)
    out = update_metrics(settings, **{name: found[name] for name in totals}, coefficients=coefficients)
    if "explained_variance" in found:
        explained = found["explained_variance"]
        out["train/explained_variance"] = None if math.isnan(explained) else explained
    return out | {name: value for name, value in found.items() if name.startswith("reward/")}
