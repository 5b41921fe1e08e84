"""Holds what a comparison is about: the episodes of one policy or of a group's, and how evaluations are unlike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from lockstep.policies.results import columns_of


@dataclass(frozen=True)
class Evaluated:
    """The episodes of one policy.

    Attributes:
        name: name of the policy.
        facts: facts about it, as ``lockstep eval --json FILE`` writes them.
        table: float64 ``[n, 4]``, see :func:`lockstep.policies.evaluation.run_episodes`.
    """

    name: str
    facts: dict[str, Any]
    table: np.ndarray

    unit: ClassVar[str] = "episode"
    statistic: ClassVar[str] = "mean"

    @property
    def count(self) -> int:
        """Number of values of each metric."""
        return len(self.table)

    @property
    def steps(self) -> int | None:
        """Steps for which the policy was trained, of a group's runs the most; None if unknown."""
        steps = self.facts.get("global_step")
        return steps if isinstance(steps, int) else None

    def values(self, metric: str) -> np.ndarray | None:
        """Returns a metric's value of each episode, ``[n]``; None unless every episode has one."""
        return _column(self.table, metric)


@dataclass(frozen=True)
class EvaluatedGroup(Evaluated):
    """The episodes of a group's runs, one policy per seed; ``table`` is that of the first.

    Attributes:
        tables: the table of each run.
        trained: the steps for which each run's policy was trained, by the run's name, where known.
    """

    tables: Sequence[np.ndarray] = ()
    trained: Mapping[str, int] = field(default_factory=dict)
    unit: ClassVar[str] = "run"
    statistic: ClassVar[str] = "iqm"

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.tables)

    @property
    def steps(self) -> int | None:
        """Steps for which the runs were trained, the most of them; None if unknown."""
        return max(self.trained.values(), default=super().steps)

    def values(self, metric: str) -> np.ndarray | None:
        """Returns the mean over the episodes of each run, ``[runs]``; None unless every episode has the metric."""
        columns = [_column(table, metric) for table in self.tables]
        return None if any(c is None for c in columns) else np.array([c.mean() for c in columns if c is not None])


def _column(table: np.ndarray, metric: str) -> np.ndarray | None:
    column = columns_of(table).get(metric)
    return None if column is None or None in column else np.asarray(column, np.float64)


def unlike(all_of_them: Sequence[Evaluated]) -> list[str]:
    """Returns a line for each way in which evaluations or training lengths differ, as it may explain a difference.

    Facts that a file lacks are skipped. But for the lengths of training, a group is represented by its first run.
    """
    first, lines = all_of_them[0], _inside(all_of_them)
    for other in all_of_them[1:]:
        both = f"({first.name})", f"({other.name})"
        mine, theirs = (known if isinstance(known, dict) else {} for known in _facts(first, other, "env_settings"))
        for name in sorted(mine.keys() & theirs.keys()):
            if mine[name] != theirs[name]:
                one, two = _apart(mine[name], theirs[name])
                what = f"env.{name} {json.dumps(one)} {both[0]}, {json.dumps(two)} {both[1]}"
                lines.append(f"other environment settings: {what}; returns may count other rewards")
        one, two = _facts(first, other, "stochastic")
        if None not in (one, two) and one != two:
            said = ["sampled" if way else "most likely" for way in (one, two)]
            lines.append(f"other choice of actions: {said[0]} {both[0]}, {said[1]} {both[1]}")
        one, two = _facts(first, other, "seed")
        if None not in (one, two) and one != two:
            lines.append(f"other starts of episodes: seed {one} {both[0]}, {two} {both[1]}")
        one, two = _facts(first, other, "max_steps")
        if isinstance(one, int) and isinstance(two, int) and one != two:
            lines.append(f"episodes are cut after {one:,} steps {both[0]}, {two:,} {both[1]}")
        one, two = first.steps, other.steps
        if one and two and one != two:  # 0: nothing, or a clone
            lines.append(f"other lengths of training: {one:,} steps {both[0]}, {two:,} {both[1]}")
    return lines


def _inside(all_of_them: Sequence[Evaluated]) -> list[str]:
    """Returns a line for each group whose runs were trained for different numbers of steps."""
    lines = []
    for group in {each.name: each for each in all_of_them if isinstance(each, EvaluatedGroup)}.values():
        lengths = sorted(set(group.trained.values()), reverse=True)
        if len(lengths) > 1:
            runs = [", ".join(name for name, steps in group.trained.items() if steps == length) for length in lengths]
            parts = [f"{length:,}{'' if n else ' steps'} ({runs[n]})" for n, length in enumerate(lengths)]
            lines.append(f"other lengths of training in {group.name}: {', '.join(parts)}")
    return lines


def _facts(one: Evaluated, other: Evaluated, name: str) -> tuple[Any, Any]:
    return one.facts.get(name), other.facts.get(name)


def _apart(one: Any, two: Any) -> tuple[Any, Any]:
    """Returns what differs between two tables; values that aren't tables are returned whole."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return one, two
    missing = object()
    keys = [key for key in {**one, **two} if one.get(key, missing) != two.get(key, missing)]
    left, right = ({key: table[key] for key in keys if key in table} for table in (one, two))
    return left, right
